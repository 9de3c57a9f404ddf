"""The settings of a deployment on a Ray cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from cocoa_engine import CocoaConfig, Runtime
from cocoa_engine.arguments import SettingsModel
from cocoa_engine.model.load_options import TENSOR_PARALLELISM, LoadOptions, loading_arguments
from cocoa_integrations.server.settings import ServerSettings

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine


class RaySettings(SettingsModel):
    """Settings of a deployment: the model, the replicas and where they are placed, and those of the server. Immutable.

    Raises:
        ConfigError: settings are unknown, out of range, or contradict each other.
    """

    _what: ClassVar[str] = "Ray setting"

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    model: str | None = Field(
        None, description="Hub id or folder of the model, readable on every node. Default: the embedded model."
    )
    loading: LoadOptions = Field(
        default_factory=LoadOptions, description="How the model is loaded: `dtype`, `device_map`, `runtime` and others."
    )
    decoding: CocoaConfig = Field(
        default_factory=CocoaConfig, description="The decoding settings of requests that give none."
    )
    server: ServerSettings = Field(default_factory=ServerSettings, description="Who may use the server, and limits.")
    api_key_file: Path | None = Field(
        None, description="File with API keys, one a line, on every node. Keys can also be in COCOA_API_KEYS."
    )
    max_batch_size: int | None = Field(
        None, ge=1, description="Maximum number of answers that a replica decodes together. Default: the runtime's, 8."
    )
    max_queue: int | None = Field(
        None,
        ge=0,
        description="Maximum number of answers that wait in a replica. More go to another replica. Default: as many as "
        "are decoded together.",
    )
    replicas: int = Field(1, ge=1, description="Number of replicas of the engine, if it is fixed.")
    min_replicas: int | None = Field(None, ge=0, description="Least number of replicas, if the load decides.")
    max_replicas: int | None = Field(None, ge=1, description="Largest number of replicas, if the load decides.")
    target_ongoing_requests: float | None = Field(
        None, gt=0, description="Calls of a replica above which more replicas are started. Default: a full batch."
    )
    upscale_delay_s: float = Field(30.0, ge=0, description="Seconds of high load before a replica is added.")
    downscale_delay_s: float = Field(600.0, ge=0, description="Seconds of low load before a replica is removed.")
    num_cpus: float = Field(1.0, gt=0, description="CPU cores of a replica.")
    threads: int | None = Field(None, ge=1, description="CPU threads of a replica. Default: one for each of its cores.")
    num_gpus: float = Field(
        0.0, ge=0, description="GPUs of a replica. A fraction shares one; several hold the layers of one model."
    )
    resources: dict[str, float] = Field(
        default_factory=dict, description="Further resources that a node must have for a replica."
    )
    accelerator_type: str | None = Field(None, description="Kind of GPU that a node must have, such as `H100`.")
    placement_group_bundles: tuple[dict[str, float], ...] | None = Field(
        None,
        description="Resources that are reserved for a replica together. The replica itself runs in the first bundle.",
    )
    placement_group_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        "STRICT_PACK", description="Whether the bundles of a replica are on one node."
    )
    gateways: int = Field(1, ge=1, description="Number of gateways, which take requests and hand them to replicas.")
    max_waiting: int | None = Field(
        None,
        ge=1,
        description="Maximum number of requests that a gateway holds while every replica is full. Default: as many as "
        "all replicas have slots, since Ray Serve counts requests that it is about to hand on.",
    )
    retries: int = Field(2, ge=0, description="How often a request is restarted because its replica ended.")
    health_check_period_s: float = Field(5.0, gt=0, description="Seconds between checks whether a replica lives.")

    metrics_interval_s: float = Field(5.0, gt=0, description="Seconds between the metrics that a replica sends.")

    @model_validator(mode="after")
    def _consistent(self) -> RaySettings:
        if self.loading.model_name not in (None, self.model):
            raise ValueError("model: name the model with `model`, not with `loading.model_name`")
        if self.loading.model_kwargs.keys() & set(TENSOR_PARALLELISM):
            raise ValueError(
                "loading.model_kwargs: tensor parallelism needs processes that all make the same calls, which a server "
                "does not; give a replica several GPUs with num_gpus, and device_map='auto' divides the layers"
            )
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise ValueError("num_gpus: a replica has a part of one GPU, or whole ones")
        if self.scales:
            if "replicas" in self.model_fields_set:
                raise ValueError("replicas: give either replicas, or min_replicas and max_replicas")
            if self.max_replicas is None or self.max_replicas < (self.min_replicas or 0):
                raise ValueError("max_replicas: it is needed with min_replicas, and must not be smaller")
        if self.placement_group_bundles is not None:
            first = self.placement_group_bundles[0] if self.placement_group_bundles else {}
            if first.get("CPU", 0) < self.num_cpus or first.get("GPU", 0) < self.num_gpus:
                raise ValueError(
                    "placement_group_bundles: the first bundle must hold the replica's own "
                    f"CPU: {self.num_cpus:g} and GPU: {self.num_gpus:g}"
                )
        return self

    @property
    def scales(self) -> bool:
        """Whether the load decides how many replicas there are."""
        return self.min_replicas is not None or self.max_replicas is not None

    @property
    def runtime(self) -> Runtime:
        """How the model of a replica is run."""
        runtime = self.loading.runtime or Runtime()
        batch = self.max_batch_size or runtime.max_batch_size
        queue = self.max_queue
        if queue is None:
            queue = runtime.max_queue if "max_queue" in runtime.model_fields_set else batch
        return runtime.model_copy(update={"max_batch_size": batch, "max_queue": queue})

    @property
    def slots(self) -> int:
        """The number of answers that a replica decodes or queues."""
        return self.runtime.max_batch_size + self.runtime.max_queue

    @property
    def waiting(self) -> int:
        """The number of requests that a gateway may hold."""
        return self.max_waiting or self.slots * (self.max_replicas or self.replicas)

    def load(self) -> CocoaEngine:
        """Load the engine of a replica."""
        options = self.loading.model_copy(update={"model_name": self.model, "runtime": self.runtime})
        engine = engine_of(options, threads=self.threads, num_cpus=self.num_cpus, num_gpus=self.num_gpus)
        engine.config = self.decoding
        engine.info()  # tries the backends and forward passes before the first request
        return engine


def engine_of(options: LoadOptions, *, num_cpus: float, num_gpus: float, threads: int | None = None) -> CocoaEngine:
    """Load the engine of an actor, with as many threads of torch as the actor has cores by default."""
    import torch

    from cocoa_engine import CocoaEngine

    if threads is not None or not num_gpus:
        torch.set_num_threads(threads or max(1, int(num_cpus)))
    return CocoaEngine.from_pretrained(**loading_arguments(options))
