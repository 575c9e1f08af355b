"""`alula serve`: the OpenAI API over a model."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from alula.cli.options import ModelOptions
from alula.config import AlulaError
from alula.server.config import ServerConfig

if TYPE_CHECKING:
    from alula.engine.config import EngineConfig
    from alula.engine.engine import Engine


@dataclass(frozen=True)
class Serve(ServerConfig, ModelOptions):
    """Serve the model to clients of OpenAI's API, until SIGTERM or Ctrl-C."""

    no_prefix_caching: bool = False
    """Compute every prompt from its beginning."""

    def __post_init__(self) -> None:
        """The settings are checked when the command runs, where a mistake ends in one sentence."""

    def run(self) -> int:
        config = ServerConfig(**{field.name: getattr(self, field.name) for field in fields(ServerConfig)})
        if self.nodes > config.max_speculation_nodes:
            raise AlulaError(
                f"nodes is {self.nodes}, but a request may have {config.max_speculation_nodes} at most: lower it, or "
                "raise max_speculation_nodes"
            )
        engine_config = self.engine_config(max_num_seqs=self.max_num_seqs, prefix_caching=not self.no_prefix_caching)
        from alula.server.app import build_app
        from alula.server.logs import set_up_logs
        from alula.server.run import bind, serve
        from alula.server.traces import open_traces
        from alula.version import alula_version

        config.keys()
        traces = open_traces(self.otlp_traces_endpoint, alula_version())
        with bind(config) as taken:
            set_up_logs(self.log_format)
            app = build_app(self._engine(engine_config), config, traces=traces)
            host, port = taken.getsockname()[:2]
            name = app.state.service.names[0]
            serve(app, config, taken, lambda: print(f"alula serves {name} at http://{host}:{port}", flush=True))
        return 0

    def _engine(self, config: EngineConfig) -> Engine:
        target = self.load_target()
        from alula.draft.choice import DrafterChoice
        from alula.draft.load import load_drafter
        from alula.draft.ngram import NgramDrafter
        from alula.engine.engine import Engine

        main = load_drafter(self.drafter, target, rule=self.rule, allow_unverified=self.allow_unverified_head)
        return Engine(target, DrafterChoice(main, {"ngram": NgramDrafter()}), config)
