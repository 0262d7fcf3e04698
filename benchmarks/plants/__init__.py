"""Faults that were put into small models on purpose, each with what a diagnosis has to say about it.

How to add a plant. Write a file in this folder; every file with a function `all_of_them() -> list[Plant]` is found by
itself (catalogue.py). A plant is a function that builds a run in which one step fails, and what must be said of it:

    from benchmarks.plants.models import Perceptron, batch_for, squares
    from benchmarks.plants.plant import LOSS, Expected, Plant, Scene, plants


    def empty_mask() -> Scene:
        # The loss is a mean over a mask that is empty from the fourth step on.
        model = Perceptron()
        x, y = batch_for(model)

        def loss_fn(model, batch):
            x, y, mask = batch
            error = (model(x).float() - y).square().mean(-1)
            return (error * mask).sum() / mask.sum()  # empty mask

        full, empty = (x, y, torch.ones(len(x))), (x, y, torch.zeros(len(x)))
        return Scene(model, loss_fn, full, steps=6, batch_at=lambda step: full if step < 3 else empty)


    def all_of_them() -> list[Plant]:
        return [*plants("empty_mask", "bf16 fp32", empty_mask, Expected("code", "aten.div", LOSS, mark="empty mask"))]

`plants(name, precisions, make, expected)` makes one plant for each precision (fp16, bf16, fp32); names must differ. The
run is `Scene` (plant.py): a model, a loss function, a batch, and if needed: `steps` (how many at most until one fails),
`batch_at` (the batch of each step), `before` (called ahead of each step, with its number from 0), `rate`, `optimizer`
(a function of the model and the rate), `scale` (fp16's first loss scale: 256 where a warm-up is not the point),
`checkpoint` (the name of one that the run was taken up from) and `options` (further arguments of the Stepper, such as
`on_gradients`). The seed is set before `make` is called. Everything runs on the CPU; bf16 is emulated
where it has none.

`Expected` says what docs/guard.md promises; what is None may be anything: `cause` (the class), `operation` (such as
"aten.div"), `module` (its path; `ROOT` for the model's own forward, `LOSS` for the loss function), `backward`, `mark`
(the line of the fault ends with a comment of this text, which is nowhere else in this folder), `outside` (a name such
as "weight head.weight" of what came into the step non-finite) and `words` that must be in the sentence. Decide it
before you look at what is said. A single event keeps its state outside the model, for example in a list of a closure: a
skip restores numbers, tensors, lists, dicts and other data that are attributes of a module, so a module that counts
its calls in `self.calls` would fail every time.

Run one: `python benchmarks/culprits.py --only empty_mask`; all: `python benchmarks/culprits.py`.
"""
