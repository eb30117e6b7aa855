"""What runs inside the training process: the ring, the recorder, steps and phases; standard library alone."""
