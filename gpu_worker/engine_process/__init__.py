"""The process that computes: it loads the model and runs the step loop."""
