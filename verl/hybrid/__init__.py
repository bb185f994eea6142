"""The way of weights from the training layout to the generation layout, and back."""
