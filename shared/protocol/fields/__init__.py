"""How a request field is declared: its types, and the reference written from declarations."""
