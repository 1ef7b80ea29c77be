"""A small convolutional network: the model, its gradient in closed form, and that one's kernels."""

# Channels of the convolutions, units of the dense layer, and the groups of channels.
FIRST, SECOND, HIDDEN, GROUPS = 16, 32, 64, 4
