"""The compiled train step: state, optimizers, precision, offloading, and a step for custom losses."""
