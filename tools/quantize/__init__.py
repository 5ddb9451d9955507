"""`penstock quantize`: a checkpoint in fewer bits."""
