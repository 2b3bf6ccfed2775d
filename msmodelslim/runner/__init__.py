"""How the steps of a recipe are driven over a model: layer by layer, whole, or on many devices at once."""
