"""Programs around the product: they may import everything, and nothing imports them."""
