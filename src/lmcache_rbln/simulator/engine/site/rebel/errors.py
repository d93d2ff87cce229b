# SPDX-License-Identifier: Apache-2.0
"""The one error of this package: something that has no model."""


def not_modelled(what: str) -> NotImplementedError:
    """The error to raise for `what`, an operator or option without a model."""
    return NotImplementedError(f"{what} is not modelled by the simulated RBLN compiler")
