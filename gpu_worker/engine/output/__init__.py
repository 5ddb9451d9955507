"""What comes out of a step: tokens, their text, parsed answers, and the rules that end it."""
