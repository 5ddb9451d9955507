"""Parts of ``scripts/train_demo_model.py``: corpus, tokenizer, batches, training, figures, card."""
