"""Which arrays of a model train, which are frozen, and which change without a gradient.

The step and whoever uses a model see the same parameters: the step takes gradients of one part of
them, and everybody else gets the parts joined.
"""

from collections.abc import Callable, Mapping

from flax import nnx

from maxtrain.objectives.objective import POLICY, Models


def nothing() -> nnx.State:
    """A part without any array."""
    return nnx.State({})


def only_policy() -> dict[str, nnx.State]:
    """What is frozen where nothing is."""
    return {POLICY: nothing()}


def join(*parts: nnx.State) -> nnx.State:
    """One state of several parts that have nothing in common."""
    filled = [part for part in parts if part]
    if len(filled) == 1:
        return filled[0]
    return nnx.merge_state(nothing(), *filled)


def models_from(
    graphdefs: Mapping[str, nnx.GraphDef],
    frozen: Mapping[str, nnx.State] | None = None,
    buffers: nnx.State | None = None,
) -> Callable[[nnx.State], Models]:
    """A function from the parameters that train to all models that an objective sees.

    Args:
        graphdefs: the structure of each model.
        frozen: the frozen parameters of the policy, and all of every other model; None: there are
            none.
        buffers: of the policy; None: it has none.
    """
    if frozen is None:
        frozen = only_policy()
    if buffers is None:
        buffers = nothing()
    others = {}
    for name, params in frozen.items():
        if name != POLICY:
            others[name] = nnx.merge(graphdefs[name], params)

    def models(trainable: nnx.State) -> Models:
        policy = join(trainable, frozen[POLICY], buffers)
        return {POLICY: nnx.merge(graphdefs[POLICY], policy), **others}

    return models
