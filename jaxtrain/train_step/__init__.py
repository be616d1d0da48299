"""The compiled train step: state, optimizers, precision, offloading, and the step for a loss of one's own."""
