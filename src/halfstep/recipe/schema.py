"""Declare the schema of a recipe; every setting is declared here and nowhere else.

The docstring below a field is its documentation: the command line, the docs and the JSON schema read it from here. The
sections `model`, `data` and `loss` belong to the task; the others are the same for every task.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

ALSO = "x-also"
"""The key of the JSON schema for the names that other projects use; editors ignore unknown `x-` keys."""
ALLOWED = "x-allowed"
"""The key for what a setting allows, in words, where the schema's own are too few."""

REFUSED = "x-refused"
"""The key for values that are refused with a reason of their own."""

AUTO = "auto"
Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]


class Also:
    """The names that other projects use for a field, such as `num_epochs`; they are translated and reported."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, object]:
        return {**handler(core), ALSO: list(self.names)}


class Refused:
    """Values that a field does not take although they look as if it did, each with the reason."""

    def __init__(self, **reasons: str) -> None:
        self.reasons = reasons

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, object]:
        return {**handler(core), REFUSED: self.reasons}


def _lowercase_text(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


AnyCase = BeforeValidator(_lowercase_text)
"""`AdamW` is `adamw`: the name of torch's class is as good."""


MOST_DRAWN = 10**9
"""Samples that are drawn by number; the order of more does not fit the memory."""
MOST_SECONDS = 1e7
"""Seconds of a timeout, 115 days; torch counts larger ones in too few bits."""
Timeout = Annotated[float, Field(gt=0.0, le=MOST_SECONDS)]


class Section(BaseModel):
    """A part of a recipe; unknown keys and wrong types are errors."""

    # strict: without it pydantic would turn the text "16" into a number, and true into 1. Non-finite numbers are
    # refused because no setting has a use for them.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class ModelOptions(Section):
    """The model settings of every task; a task adds its own fields."""

    weights: str = "none"
    """Initial weights: `none` (random), `pretrained`, or a path to a .safetensors or .pt file or a folder."""
    freeze: list[str] = []
    """Names of modules that are not trained, such as `encoder` or `layer1`."""


EXACT = "exact"
"""The value of `data.split` in new runs."""
NO_FILE = ("none", "pretrained")
"""The values of `model.weights` that the task itself interprets; others are paths."""
WEIGHTS = ".safetensors, a folder of these, or .pt and .pth with tensors alone"
"""What such a path may name."""


class DataOptions(Section):
    """The data settings of every task; a task adds its own fields."""

    split: Literal["exact", "by_place"] | None = None
    """How the share in `val` is drawn: `by_place` uses a hash of each sample's name, so the share is approximate;
    `exact` draws exactly that share if there are fewer than 1,000 samples."""
    window: PositiveInt | Literal["auto", "all"] | None = None
    """shards: the size of the shuffle window in chunks of consecutive samples, for slow disks; `all` shuffles the whole
    dataset; `auto` uses a window that fits in a quarter of the memory, or, for an object store, in half of store.cache.
    Default: `all`; for an object store, `auto`."""
    verify: Literal["all", "sampled", "off"] = "sampled"
    """shards: which samples are compared with their digests as they are read; `sampled` is 1 in 64."""
    bad_samples: NonNegativeInt = 10
    """The number of unreadable samples that are replaced by others; one more ends the run with an error."""
    timeout: Annotated[float, Field(ge=0.0, le=MOST_SECONDS)] = 120.0
    """Seconds that a worker may take to read a sample; a slower one counts as unreadable. 0 sets no limit."""


class LossOptions(Section):
    """The loss settings of a task; a task adds its own fields."""


class OptimizerOptions(Section):
    """The settings of the optimizer."""

    name: Annotated[
        Literal[
            "adamw", "adam", "sgd", "muon", "nadam", "radam", "adamax", "adafactor", "adagrad", "adadelta", "rmsprop",
            "rprop", "asgd",
        ],
        Also("optim"),
        AnyCase,
        Refused(
            lbfgs="it computes the loss several times in one update, and a step here computes it once",
            sparseadam="it takes only sparse gradients, and the models of recipes have dense ones",
        ),
    ] = "adamw"  # fmt: skip
    """The torch optimizer. With muon, Muon trains the matrices of hidden layers; AdamW trains the output layer,
    embeddings, convolutions, norms and biases."""
    lr: Annotated[PositiveFloat, Also("learning_rate")] = 1e-3
    """The learning rate; with a schedule, its peak value."""
    weight_decay: NonNegativeFloat = 0.01
    """Decay of weights towards zero; biases and normalization layers are left out. rprop has none."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Momentum of sgd, muon and rmsprop, and the first beta of adamw, adam, nadam, radam and adamax."""
    fused: bool = True
    """Use the fused kernel of the optimizer if the device has one."""
    state: Literal["fp32", "int8", "fp8"] = "fp32"
    """adamw and adam: the format of the two moments of matrices. Embeddings, vectors and small tensors keep fp32."""


class Extension(Section):
    """Where a run ended before it was extended."""

    epochs: PositiveInt | None = None
    """After how many epochs. Give epochs or steps."""
    steps: PositiveInt | None = None
    """After how many updates. Give epochs or steps."""
    rewarm: bool = False
    """Start a new warm-up and decay there; otherwise the learning rate stays where the schedule left it."""


class ScheduleOptions(Section):
    """The settings of the learning rate schedule."""

    name: Annotated[
        Literal["constant", "cosine", "step", "plateau", "one-cycle"],
        Also("lr_scheduler", "lr_scheduler_type", "sched"),
    ] = "cosine"
    """The learning rate schedule after the warm-up."""
    warmup_steps: Annotated[NonNegativeInt, Also("lr_warmup_steps", "num_warmup_steps")] = 0
    """Applied steps over which the learning rate rises from zero."""
    final: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """cosine: the final learning rate, as a share of its peak."""
    every_epochs: PositiveInt = 30
    """step: epochs between two cuts."""
    factor: Fraction = 0.1
    """step and plateau: each cut multiplies the learning rate by this."""
    patience: NonNegativeInt = 5
    """plateau: evaluations without progress before a cut."""
    extensions: list[Extension] = []
    """Earlier lengths of a run extended with `--extend`, such as {epochs: 20, rewarm: true}; written by --extend."""


class LossScaleOptions(Section):
    """The loss scale of fp16. Other precisions need none."""

    init_scale: PositiveFloat = 65536.0
    """The initial loss scale."""
    growth_factor: Annotated[float, Field(gt=1.0)] = 2.0
    """Growth multiplies the loss scale by this."""
    backoff_factor: Fraction = 0.5
    """An overflow multiplies the loss scale by this."""
    growth_interval: PositiveInt = 2000
    """Steps without overflow before the scale grows."""
    floor: PositiveFloat = 1.0
    """The scale never falls below this."""
    cap: PositiveFloat = 2.0**24
    """The scale never grows above this."""


class TrainOptions(Section):
    """The settings of the training loop."""

    epochs: Annotated[PositiveInt | None, Also("num_epochs", "num_train_epochs", "max_epochs")] = None
    """Passes over the training data. Give epochs or steps."""
    steps: Annotated[PositiveInt | None, Also("max_steps", "max_train_steps")] = None
    """The total number of updates, skipped ones included. Give epochs or steps."""
    batch_size: Annotated[
        PositiveInt, Also("BATCH_SIZE_PER_GPU", "per_device_train_batch_size", "train_batch_size")
    ] = 16
    """Samples per device and micro-batch."""
    microbatches: Annotated[
        PositiveInt,
        Also("accumulation_steps", "gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum_steps"),
    ] = 1
    """Gradient accumulation: micro-batches per update."""
    global_batch: Annotated[PositiveInt | None, Also("global_batch_size")] = None
    """Samples per update over all ranks; `microbatches` is derived from it, with at most `batch_size` samples each."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """The random seed for initialization, shuffling and augmentation; by default one is drawn and recorded."""
    clip_norm: Annotated[
        PositiveFloat | None, Also("grad_clip", "gradient_clip_val", "max_grad_norm", "clip_grad", "gradient_clipping")
    ] = None
    """The maximum gradient norm; larger gradients are scaled down to it."""
    clip_value: PositiveFloat | None = None
    """The maximum absolute value of a gradient element; larger ones are clipped."""
    ema: Annotated[Fraction | None, Also("ema_decay", "model_ema_decay")] = None
    """The decay of an exponential moving average of the weights; the average is evaluated and saved, too."""
    weight_format: Literal["fp32", "bf16-split", "bf16-stochastic"] = "fp32"
    """How trained weights are stored: bf16-split is bf16 and, next to it, the low 16 bits of fp32; bf16-stochastic is
    bf16 alone, with stochastic rounding. Both compute in bf16."""
    gradient_sums: Literal["fp32", "bf16"] = "fp32"
    """bf16 weights: the format in which gradients are accumulated over micro-batches and reduced over ranks."""
    channels_last: bool = True
    """Store images channels-last, the layout that fast 16-bit convolutions need."""
    compile: Annotated[bool, Also("compile_model", "use_optimizations", "torch_compile", "torchcompile")] = False
    """Compile the model with torch.compile; a sharded model is compiled block by block."""
    checkpoint_activations: Annotated[
        bool, Also("gradient_checkpointing", "grad_checkpointing", "activation_checkpointing")
    ] = False
    """Recompute activations in backward instead of saving them: less memory, more time. Cannot be combined with
    compile."""
    num_workers: Annotated[NonNegativeInt | Literal["auto"], Also("workers", "dataloader_num_workers")] = "auto"
    """DataLoader workers per device; `auto` measures the required number once."""
    check: bool = True
    """Compare the first micro-batch with fp32 before the first update, at the cost of about two steps."""
    strict: bool = False
    """Compute in the precision requested, emulated if need be, or refuse to run; no fallback to another."""
    device: Annotated[str, Also("gpu_ids", "gpu_id", "gpu")] = "auto"
    """A torch device or the index of a GPU; `auto` selects the best device available."""


class WorldOptions(Section):
    """The ranks that train together. `world: fsdp` is short for `world: {mode: fsdp}`."""

    mode: Annotated[Literal["auto", "ddp", "fsdp", "hsdp"], Also("strategy")] = "auto"
    """Each rank holds all weights (ddp), a shard of them (fsdp), or a shard within each group (hsdp)."""
    shard_size: Annotated[int, Field(ge=2)] | None = None
    """hsdp: ranks in a group that shares one copy of the weights; by default the ranks of a node."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """fsdp and hsdp: the format in which gradients are reduced over the ranks; bf16 halves the communication, and its
    error is measured against fp32 every 100 steps."""
    sync_batchnorm: Annotated[bool, Also("sync_bn")] = False
    """Compute batch statistics over all ranks (torch's SyncBatchNorm). GPUs only."""
    timeout: Timeout = 300.0
    """Seconds without any progress after which the run ends with exit code 76 and names the rank that is behind."""
    start_timeout: Timeout = 600.0
    """The same limit for the first step, evaluation and save, in which torch compiles and allocates."""


class EvaluateOptions(Section):
    """The settings of evaluation and early stopping."""

    every_epochs: Annotated[PositiveInt, Also("check_val_every_n_epoch")] = 1
    """Epochs between two evaluations; the first and the last epoch always end with one."""
    patience: Annotated[PositiveInt | None, Also("early_stopping_patience")] = None
    """Stop early after this many evaluations without improvement."""
    min_delta: NonNegativeFloat = 0.0
    """A metric must be better by more than this to count as an improvement."""


class CheckpointOptions(Section):
    """The settings of checkpoints."""

    every_steps: Annotated[PositiveInt, Also("save_steps", "checkpointing_steps")] = 1000
    """Attempted updates between two checkpoints; one is also taken at the end of every epoch, and on SIGTERM."""
    every_minutes: PositiveFloat | Literal["auto"] | None = None
    """Also save a checkpoint after this many minutes by rank 0's clock; `auto` uses the Young-Daly interval."""
    keep: Annotated[int, Field(ge=2), Also("save_total_limit", "checkpoints_total_limit")] = 2
    """The number of newest checkpoints that are kept; at least two, because one may be damaged."""
    background: bool = True
    """Write in the background, from a copy of the state in main memory."""
    remote: str | None = None
    """An address such as s3://BUCKET/RUN: checkpoints are copied there, and a machine without a
    local checkpoint resumes from it."""
    remote_wait: Annotated[float, Field(ge=0.0, le=MOST_SECONDS)] = 60.0
    """Seconds to wait at the end of a run for the upload of the last checkpoint."""


class StoreOptions(Section):
    """The settings of object stores. Credentials are no settings: the environment or a role has them."""

    patience: Timeout = 300.0
    """Seconds for which a failed request is retried."""
    cache: PositiveFloat = 20.0
    """The size in GB of the disk cache of each machine for samples from an object store; the oldest are evicted."""


class GuardOptions(Section):
    """The reaction to failed steps. `guard: repair` is short for `guard: {mode: repair}`."""

    mode: Literal["off", "watch", "repair"] = "watch"
    """On failed steps: report the cause and stop with exit code 80 if they persist (watch), or apply a remedy
    (repair)."""
    skips_in_a_row: PositiveInt = 5
    """The number of consecutive skipped steps that ends the run, or triggers a remedy; loss scale calibration is not
    counted."""
    skip_share: Fraction = 0.25
    """The share of skipped steps among the last 100 that has the same effect."""
    rollbacks: NonNegativeInt = 2
    """repair: how often the run may go back to its last good state before it gives up."""
    probation: PositiveInt = 1000
    """repair: remove a remedy after this many applied steps without a failure."""
    spikes: Literal["off", "warn", "refuse"] = "warn"
    """On a loss spike (finite, far above recent losses): report it and accept a new level that persists (warn), or skip
    the step (refuse)."""


MetricsFile = Annotated[
    str, Field(pattern=r"^.+\.prom$", json_schema_extra={ALLOWED: "the path of a file that ends with .prom"})
]


class RunOptions(Section):
    """The settings of the run's folder, its log and its tracker."""

    dir: Annotated[str | None, Also("output_dir", "default_root_dir")] = None
    """The run's folder; by default `runs/RECIPE`."""
    console: Annotated[Literal["table", "guide"], Also("style")] = "table"
    """`table`: one row per epoch and one live line. `guide`: reasons, bars and a summary of each epoch, as in the
    guides of other projects; train.log always has these lines."""
    log_every: Annotated[PositiveInt, Also("logging_steps", "log_every_n_steps")] = 10
    """Steps between two lines of the log."""
    journal_mb: PositiveInt = 100
    """Megabytes after which journal.jsonl continues in a new file; the earlier files are kept."""
    tracker: Annotated[Literal["none", "tensorboard", "wandb", "mlflow"], Also("report_to")] = "none"
    """The experiment tracker that also receives the values of the journal; for mlflow, set MLFLOW_TRACKING_URI."""
    pictures: NonNegativeInt = 4
    """The number of samples to show as pictures after each evaluation, in tasks with pictures."""
    pictures_kept: PositiveInt = 100
    """The number of newest pictures that are kept in the run's folder."""
    prometheus: bool | MetricsFile = False
    """Write Prometheus metrics to metrics.prom in the run's folder (true) or to the given .prom file; in a recipe, the
    file must be inside that folder."""


ModelT = TypeVar("ModelT", bound=ModelOptions)
DataT = TypeVar("DataT", bound=DataOptions)
LossT = TypeVar("LossT", bound=LossOptions)


class Recipe(Section, Generic[ModelT, DataT, LossT]):
    """One complete run."""

    task: str
    """The task: segmentation, classification, diffusion, slots, text, or one of your own."""
    about: str = ""
    """A sentence on what this recipe is for."""
    precision: str = Field("auto", json_schema_extra={ALLOWED: "a precision, or a policy by module"})
    """fp32, tf32, bf16, fp16, fp8, fp8-rowwise, fp8-rowwise-gw-hp, mxfp8; amp: bf16 where native, else fp16; or auto:
    the fastest that is safe here. A policy by module: {default: bf16, "blocks.*": fp8, "*.norm": fp32}. Names
    from other projects are accepted.
    """
    sizing: Literal["none", "auto"] = "none"
    """`auto` chooses unset values (batch size, image size, model size, training length ...) for the dataset and the
    machine."""
    model: ModelT
    data: DataT
    loss: LossT
    optimizer: OptimizerOptions = OptimizerOptions()
    schedule: ScheduleOptions = ScheduleOptions()
    loss_scale: LossScaleOptions = LossScaleOptions()
    train: TrainOptions = TrainOptions()
    world: WorldOptions = WorldOptions()
    evaluate: EvaluateOptions = EvaluateOptions()
    checkpoint: CheckpointOptions = CheckpointOptions()
    store: StoreOptions = StoreOptions()
    guard: GuardOptions = GuardOptions()
    run: RunOptions = RunOptions()
