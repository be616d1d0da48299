"""The kinds of a scan's arguments, in whichever way a version of JAX writes them down."""

from jax.extend.core import JaxprEqn


def parts_of_scan(eqn: JaxprEqn) -> tuple[int, int]:
    """Return how many arguments of a scan are the same in all rounds, and how many it carries from one to the next."""
    if "ft_in" in eqn.params:  # since JAX 0.12
        fixed, carried, _ = (len(list(part)) for part in eqn.params["ft_in"].unpack())
        return fixed, carried
    return eqn.params["num_consts"], eqn.params["num_carry"]
