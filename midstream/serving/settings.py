"""What one HTTP server is told at start: addresses, keys and limits. Frozen, validated once."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from midstream.errors import InvalidInput
from midstream.types import LogprobsMode


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Everything the server needs beside its engine. The flags of ``midstream serve`` are made from these fields."""

    host: str = "127.0.0.1"
    """Address to listen on. Only this machine reaches the default."""
    port: int = 8000
    """0: any free port, which is printed."""
    served_model_name: tuple[str, ...] = ()
    """Names that requests may call the model by; the first one is in every answer. By default the model as given."""
    api_key: str | None = None
    """Generation needs it as Bearer token."""
    control_token: str | None = None
    """Control routes (pause, weights, sleep) need it as Bearer token, on whatever address they are."""
    control_host: str | None = None
    """Serve the control routes here instead of beside generation: a loopback or private address."""
    control_port: int | None = None
    """Port of control_host, or of its own on the same host."""
    insecure_control: bool = False
    """Serve control routes without a token on an address that others can reach."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    """Of which distribution answers give logprobs: the model's (raw), or the one sampled from (processed)."""
    enable_return_routed_experts: bool = False
    """Answers say which experts served each token, unless a request says otherwise. The model must have experts."""
    max_body_bytes: int = 8 << 20
    """A longer request body is refused: everybody waits while one is parsed."""
    max_concurrency: int = 1024
    """Generation requests at work at the same time; one more is refused as retryable."""
    max_request_tokens: int = 1 << 20
    """Prompt tokens in one request, all its prompts together. /tokenize takes as many characters, or more where they
    can be a prompt."""
    max_request_sequences: int = 1024
    """Prompts times n in one request."""
    reattach_s: float = 30.0
    """How long a request with an idempotency key runs on, and its answer is kept, with nobody reading."""
    heartbeat_s: float = 1.0
    """A stream that has nothing to say for this long gets a comment line."""
    trust_request_chat_template: bool | None = None
    """Whether a request may bring a chat template of its own; by default only on a loopback address. A template is a
    program: it reaches nothing but the messages, and its loops end after 2 s, but one huge computation in it can stall
    or kill the server."""
    shutdown_s: float = 2.0
    """At the end: how long answers may take to leave."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "served_model_name", tuple(self.served_model_name))
        for name in ("port", "control_port"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 65535:
                raise InvalidInput(f"{name} must be in [0, 65535], got {value}")
        for name in ("max_body_bytes", "max_concurrency", "max_request_tokens", "max_request_sequences"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("heartbeat_s", "shutdown_s"):
            if not getattr(self, name) > 0:
                raise InvalidInput(f"{name} must be positive, got {getattr(self, name)}")
        if not self.reattach_s >= 0:
            raise InvalidInput(f"reattach_s must be >= 0, got {self.reattach_s}")
        for name in ("api_key", "control_token"):
            value = getattr(self, name)
            if value is not None and not value.strip():
                raise InvalidInput(f"{name} is empty: give a key, or leave it (MIDSTREAM_{name.upper()} too) away")
        if self.logprobs_mode not in ("raw_logprobs", "processed_logprobs"):
            raise InvalidInput(f"logprobs_mode must be raw_logprobs or processed_logprobs, got {self.logprobs_mode!r}")
        if self.has_control_address and not (
            self.control_token or self.insecure_control or is_private(self.control_host or self.host)
        ):
            raise InvalidInput(
                f"control routes on {self.control_host or self.host} would be open to others: give --control-token, "
                "a loopback or private --control-host, or --insecure-control"
            )

    @property
    def has_control_address(self) -> bool:
        """Control routes have a listener of their own."""
        return self.control_host is not None or self.control_port is not None

    @property
    def control_off(self) -> str | None:
        """Why the generation address serves no control routes, or None where it does."""
        if self.has_control_address:
            return "control routes are not served on this address"
        if self.control_token or self.insecure_control or is_loopback(self.host):
            return None
        return (
            f"control routes are off, because {self.host} can be reached by others: start with --control-token, with "
            "a --control-host or --control-port of their own, or with --insecure-control"
        )

    @property
    def allows_request_chat_template(self) -> bool:
        trusted = self.trust_request_chat_template
        return is_loopback(self.host) if trusted is None else trusted


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``. A name other than localhost may mean anything, so it counts as no."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def is_private(host: str) -> bool:
    """Loopback, or an address that is not routed on the internet. 0.0.0.0 and :: listen on every address: no."""
    address = _address(host)
    return is_loopback(host) if address is None else address.is_private and not address.is_unspecified
