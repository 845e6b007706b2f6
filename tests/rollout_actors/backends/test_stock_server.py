"""The client of a stock `vllm serve`: what it asks, what it accepts, and what it says of a server
that was started otherwise.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import pickle
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from fake_server import make_address, make_offer, make_request, make_settings, serving
from fake_stock_server import GENERATE, StockServer
from PIL import Image
from pydantic import TypeAdapter

from rollout_actors.backends.stock_server import (
    NOT_FLAGS,
    ServerEngineSpec,
    StockClient,
    stock_arguments,
    stock_environment,
)
from rollout_actors.engine.settings import EngineSettings, engine_arguments
from shared.errors import RolloutError, WeightSyncError
from shared.prompts import on_white
from shared.records import ImageRef
from shared.rollouts import FinishReason, WeightOffer
from shared.tokens.repeat_guard import RepeatGuardSettings
from shared.weight_sync.canary import CanaryProbe
from shared.weight_sync.offer import AdapterFiles, AdapterOffer
from shared.weight_sync.phases import SyncPhase
from shared.weight_sync.transports import TransportKind

DOC = Path(__file__).parents[3] / "docs" / "stock_server.md"
GUARD = RepeatGuardSettings(
    min_new_tokens=4,
    max_consecutive_token_repeats=3,
    ngram_size=2,
    ngram_repeats=3,
    max_object_keys=None,
)


@pytest.fixture
def expected(tmp_path: Path) -> EngineSettings:
    return make_settings(tmp_path / "model")


@pytest.fixture
def server() -> StockServer:
    return StockServer()


@pytest.fixture
def url(server: StockServer) -> Iterator[str]:
    with serving(server.app()) as url:
        yield url


def picture(mode: str, *, turned: bool = False) -> ImageRef:
    image = Image.frombytes("RGB", (3, 2), bytes(range(0, 180, 10))).convert(mode)
    if mode == "RGBA":
        image.putalpha(100)
    exif = Image.Exif()
    if turned:
        exif[0x0112] = 6
    buffer = io.BytesIO()
    image.save(buffer, "PNG", exif=exif)
    return ImageRef(path=None, data=buffer.getvalue(), sha256="")


def client(
    url: str, expected: EngineSettings, *, watch_s: float = 10.0, **changes: Any
) -> StockClient:
    return StockClient(
        "server-0",
        make_address(url, kind="vllm", **changes),
        index=0,
        expected=expected,
        watch_s=watch_s,
    )


async def started(url: str, expected: EngineSettings, **changes: Any) -> StockClient:
    one = client(url, expected, **changes)
    assert await one.start() == 1
    return one


def an_offer() -> WeightOffer:
    return replace(make_offer(), canary=CanaryProbe((1, 2), (), (1, 2, 7), (-0.5, -0.5), 1e-4))


async def synced(one: StockClient, what: WeightOffer) -> Any:
    for phase in SyncPhase:
        report = await one.run_sync_phase(phase, what)
    return report


class TestStart:
    @pytest.mark.slow
    def test_a_suitable_server_gets_a_label_of_this_run_and_is_asked_to_go_on(
        self, server: StockServer, url: str, expected: EngineSettings
    ) -> None:
        asyncio.run(started(url, expected))
        assert server.routes == ["/resume", "/update_weight_version", "/collective_rpc guard_by"]
        assert server.label.startswith("rollmatch-") and server.label.endswith("-0")

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("route", "status", "said"),
        [
            (GENERATE, 401, r"server\.token_env"),
            (GENERATE, 403, "--enable-scale-out"),
            (GENERATE, 404, r"server\.kind"),
            ("/is_paused", 404, "VLLM_SERVER_DEV_MODE=1"),
        ],
    )
    def test_a_closed_route_names_what_opens_it(
        self,
        server: StockServer,
        url: str,
        expected: EngineSettings,
        route: str,
        status: int,
        said: str,
    ) -> None:
        server.closed[route] = status
        with pytest.raises(RolloutError, match=f"start on server-0: {url} .*{said}"):
            asyncio.run(started(url, expected))

    def test_a_route_that_fails_is_named_with_the_servers_url_once(
        self, server: StockServer, url: str, expected: EngineSettings
    ) -> None:
        server.closed["/get_world_size"] = 500
        with pytest.raises(RolloutError) as caught:
            asyncio.run(started(url, expected))
        assert str(caught.value).count(url) == 1

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("name", "value", "said"),
        [
            ("model_config.dtype", "torch.bfloat16", "--dtype float32"),
            ("model_config.max_model_len", 32, "--max-model-len 64"),
            ("model_config.logprobs_mode", "raw_logprobs", "--logprobs-mode processed_logprobs"),
            ("model_config.multimodal_config", None, "--limit-mm-per-prompt"),
            ("scheduler_config.max_num_seqs", 4, "--max-num-seqs 8"),
            ("parallel_config.data_parallel_size", 2, "--data-parallel-size 1"),
            ("parallel_config.pipeline_parallel_size", 2, "--pipeline-parallel-size 1"),
            (
                "parallel_config.worker_extension_cls",
                "",
                r"--worker-extension-cls rollout_actors\.weight_sync\.worker\.VerifyingWorker",
            ),
            (
                "weight_transfer_config",
                None,
                r"--weight-transfer-config '\{\"backend\": \"rollmatch_gloo\"\}'",
            ),
            ("weight_transfer_config", {"backend": "nccl"}, "it takes weights over nccl"),
        ],
    )
    def test_every_argument_that_is_missing_or_other_is_named(
        self,
        server: StockServer,
        url: str,
        expected: EngineSettings,
        name: str,
        value: Any,
        said: str,
    ) -> None:
        server.changes = {name: value}
        with pytest.raises(RolloutError, match=said):
            asyncio.run(started(url, expected))

    def test_all_of_them_are_named_at_once(
        self, server: StockServer, url: str, expected: EngineSettings
    ) -> None:
        server.changes = {"model_config.dtype": "torch.bfloat16", "weight_transfer_config": None}
        with pytest.raises(RolloutError, match=r"--dtype float32; .*--weight-transfer-config"):
            asyncio.run(started(url, expected))

    def test_a_guard_that_is_asked_for_and_not_there_ends_the_start(
        self, server: StockServer, url: str, expected: EngineSettings
    ) -> None:
        server.holds_guard = False
        guarded = replace(expected, repeat_guard=GUARD)
        with pytest.raises(
            RolloutError,
            match=(
                r"holds no repeat guard, and rollout_matching\.repeat_terminate asks for one:"
                r" --logits-processors rollout_actors"
            ),
        ):
            asyncio.run(started(url, guarded))
        asyncio.run(started(url, expected))  # which needs none

    @pytest.mark.slow
    def test_the_runs_rule_comes_with_its_start_and_again_with_its_syncs(
        self, server: StockServer, url: str, expected: EngineSettings
    ) -> None:
        guarded = asyncio.run(started(url, replace(expected, repeat_guard=GUARD)))
        assert server.guard == asdict(GUARD)
        asyncio.run(started(url, expected))
        assert server.guard is None
        server.asked.clear()
        asyncio.run(synced(guarded, an_offer()))
        assert server.guard == asdict(GUARD), "weights and rule are of one run"
        assert server.routes.index("/collective_rpc guard_by") == 1 + server.routes.index(
            "/pause?mode=wait&clear_cache=false"
        )

    @pytest.mark.slow
    def test_a_server_whose_workers_do_not_take_the_rule_is_waited_for_no_longer_than_a_phase(
        self, server: StockServer, url: str, expected: EngineSettings
    ) -> None:
        guarded = asyncio.run(started(url, replace(expected, repeat_guard=GUARD)))
        server.guard_latency_s = 60.0
        offer = replace(make_offer(timeout_s=0.2), canary=an_offer().canary)
        late = (
            r"rendezvous on server-0: .*no answer from its workers .*after timeouts\.sync_phase_s ="
            r" 0\.2 s"
        )
        with pytest.raises(WeightSyncError, match=late):
            asyncio.run(asyncio.wait_for(synced(guarded, offer), 5.0))
        with pytest.raises(
            RolloutError,
            match=r"start on server-0: .*after rollout_matching\.vllm\.server\.timeout_s = 1 s",
        ):
            asyncio.run(asyncio.wait_for(started(url, expected, timeout_s=1.0), 5.0))

    def test_a_server_that_never_comes_up_names_the_command_that_starts_it(
        self, expected: EngineSettings
    ) -> None:
        with pytest.raises(
            RolloutError, match=r"VLLM_SERVER_DEV_MODE=1 .*vllm serve .*--enable-scale-out"
        ):
            asyncio.run(started("http://127.0.0.1:9", expected, timeout_s=0.5))

    @pytest.mark.slow
    @pytest.mark.parametrize("label", ["rollmatch-another-7", "rollmatch-unverified", "mine"])
    def test_the_weights_of_another_run_are_not_served(
        self, server: StockServer, url: str, expected: EngineSettings, label: str
    ) -> None:
        server.label = label
        one = asyncio.run(started(url, expected))
        with pytest.raises(RolloutError, match="weights that another run has sent"):
            asyncio.run(one.generate([make_request(0)]))
        assert ("/collective_rpc abandon_update" in server.routes) == (
            label == "rollmatch-unverified"
        ), "a model in pieces is made whole"
        asyncio.run(synced(one, an_offer()))
        assert asyncio.run(one.generate([make_request(0)]))[0].weight_version == 1


class TestGenerate:
    def test_rollouts_are_read_with_the_stop_token_apart(
        self, url: str, expected: EngineSettings
    ) -> None:
        one = asyncio.run(started(url, expected))
        first, second = asyncio.run(one.generate([make_request(0), make_request(1)]))
        assert (first.prompt_token_ids, first.response_token_ids, first.logprobs) == (
            (1, 2, 7),
            (3, 4),
            (-0.375, -0.5),
        )
        assert (first.stop_token_id, first.stop_token_logprob, first.finish_reason) == (
            9,
            -1.125,
            FinishReason.STOP,
        )
        assert (first.position, second.position, second.seed, second.actor, second.attempt) == (
            0,
            1,
            101,
            "server-0",
            0,
        )

    def test_the_request_leaves_nothing_to_the_servers_defaults(
        self, server: StockServer, url: str, expected: EngineSettings
    ) -> None:
        image = picture("RGB")
        decode = replace(make_request(0).decode, banned_token_ids=(5,), top_k=4)
        asyncio.run(
            asyncio.run(started(url, expected)).generate(
                [replace(make_request(0), images=(image,), decode=decode)]
            )
        )
        _, body = server.asked[-1]
        assert body["token_ids"] == [1, 2] and body["return_token_ids"]
        (part,) = body["content_parts"]
        assert part == {
            "type": "image_url",
            "url": f"data:image/png;base64,{base64.b64encode(image.data or b'').decode()}",
        }
        assert body["sampling_params"] == {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 4,
            "repetition_penalty": 1.0,
            "max_tokens": 4,
            "seed": 100,
            "stop_token_ids": [9],
            "ignore_eos": True,
            "logit_bias": {"5": -100.0},
            "logprobs": 0,
            "detokenize": False,
        }

    @pytest.mark.slow
    @pytest.mark.parametrize(("mode", "turned"), [("RGBA", False), ("L", False), ("RGB", True)])
    def test_an_image_that_the_server_would_read_otherwise_goes_as_the_pixels_of_the_learner(
        self, server: StockServer, url: str, expected: EngineSettings, mode: str, turned: bool
    ) -> None:
        image = picture(mode, turned=turned)
        asyncio.run(
            asyncio.run(started(url, expected)).generate(
                [replace(make_request(0), images=(image,))]
            )
        )
        sent = Image.open(
            io.BytesIO(
                base64.b64decode(server.asked[-1][1]["content_parts"][0]["url"].partition(",")[2])
            )
        )
        assert (sent.mode, sent.getexif()) == ("RGB", {})
        assert sent.tobytes() == on_white(Image.open(io.BytesIO(image.data or b""))).tobytes()

    def test_an_image_with_damaged_exif_data_goes_as_its_pixels(
        self, server: StockServer, url: str, expected: EngineSettings
    ) -> None:
        file = io.BytesIO()
        Image.new("RGB", (3, 2), (9, 8, 7)).save(file, "PNG", exif=b"Exif\0\0garbage")
        image = ImageRef(path=None, data=file.getvalue(), sha256="0" * 64)
        with pytest.raises(SyntaxError), Image.open(file) as damaged:
            damaged.getexif()
        asyncio.run(
            asyncio.run(started(url, expected)).generate(
                [replace(make_request(0), images=(image,))]
            )
        )
        sent = Image.open(
            io.BytesIO(
                base64.b64decode(server.asked[-1][1]["content_parts"][0]["url"].partition(",")[2])
            )
        )
        assert (sent.mode, sent.getpixel((1, 1)), sent.getexif()) == ("RGB", (9, 8, 7), {})

    def test_no_requests_make_no_call(
        self, server: StockServer, url: str, expected: EngineSettings
    ) -> None:
        one = asyncio.run(started(url, expected))
        before = len(server.asked)
        assert asyncio.run(one.generate([])) == []
        assert len(server.asked) == before

    def test_a_failed_call_is_tried_once_more_with_the_same_seeds(
        self, server: StockServer, url: str, expected: EngineSettings
    ) -> None:
        one = asyncio.run(started(url, expected))
        server.failures = 1
        assert asyncio.run(one.generate([make_request(0)]))[0].attempt == 1
        (_, first), (_, second) = server.asked[-2:]
        assert first == second
        server.failures = 2
        with pytest.raises(RolloutError, match=f"{url} failed 2 times"):
            asyncio.run(one.generate([make_request(0)]))

    @pytest.mark.slow
    def test_an_answer_that_takes_too_long_is_given_up(
        self, server: StockServer, url: str, expected: EngineSettings
    ) -> None:
        one = asyncio.run(started(url, expected, infer_timeout_s=0.2))
        server.latency_s = 5.0
        with pytest.raises(RolloutError, match=r"failed 2 times.*after 0\.2 s"):
            asyncio.run(one.generate([make_request(0)]))

    @pytest.mark.slow
    def test_an_engine_whose_counter_of_tokens_stands_still_is_given_up(
        self, server: StockServer, url: str, expected: EngineSettings
    ) -> None:
        one = asyncio.run(started(url, expected, infer_timeout_s=None, timeout_s=2.0, watch_s=0.1))
        server.latency_s = 60.0
        with pytest.raises(
            RolloutError,
            match=(
                r"failed 2 times.*sampled no token for rollout_matching\.vllm\.server\.timeout_s"
                r" = 2 s"
            ),
        ):
            asyncio.run(one.generate([make_request(0)]))

    @pytest.mark.slow
    def test_a_server_that_counts_no_tokens_is_waited_for_as_long_as_it_answers(
        self, server: StockServer, url: str, expected: EngineSettings
    ) -> None:
        one = asyncio.run(started(url, expected, infer_timeout_s=None, timeout_s=2.0, watch_s=0.1))
        server.latency_s, server.num_tokens = 3.0, None
        assert asyncio.run(one.generate([make_request(0)]))[0].attempt == 0

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("choice", "said"),
        [
            ({"finish_reason": "abort"}, "half an answer is none"),
            ({"weight_versions": [{"version": "default"}]}, r"labelled \['default'\]"),
            ({"weight_versions": None}, "labelled"),
            ({"logprobs": None}, "one log-probability for each"),
            (
                {"logprobs": {"content": [{"token_id": 3, "logprob": -9999.0}] * 3}},
                "no log-probability at token 0",
            ),
            ({"token_ids": "nonsense"}, "check that it is a `vllm serve` of vLLM 0.32"),
        ],
    )
    def test_what_is_no_whole_rollout_of_these_weights_is_refused(
        self,
        server: StockServer,
        url: str,
        expected: EngineSettings,
        choice: dict[str, Any],
        said: str,
    ) -> None:
        one = asyncio.run(started(url, expected))
        server.choice = choice
        with pytest.raises(RolloutError, match=said):
            asyncio.run(one.generate([make_request(0)]))

    def test_a_repetition_that_went_on_says_that_the_guard_was_not_active(
        self, server: StockServer, url: str, expected: EngineSettings
    ) -> None:
        one = asyncio.run(started(url, replace(expected, repeat_guard=GUARD)))
        tokens = [5, 5, 5, 5, 5, 5]
        server.choice = {
            "finish_reason": "length",
            "token_ids": tokens,
            "logprobs": {"content": [{"token_id": 5, "logprob": -0.5}] * 6},
        }
        with pytest.raises(RolloutError, match="was not active"):
            asyncio.run(one.generate([make_request(0)]))


class TestSync:
    @pytest.mark.slow
    def test_the_phases_are_the_servers_own_routes_in_order(
        self, server: StockServer, url: str, expected: EngineSettings
    ) -> None:
        one = asyncio.run(started(url, expected))
        server.asked.clear()
        report = asyncio.run(synced(one, an_offer()))
        assert server.routes == [
            "/pause?mode=wait&clear_cache=false",
            "/collective_rpc guard_by",
            "/shutdown_weight_transfer_engine",
            "/init_weight_transfer_engine",
            "/collective_rpc begin_verified_load",
            "/update_weight_version",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
            "/collective_rpc load_report",
            "/reset_prefix_cache",
            "/reset_mm_cache",
            "/reset_encoder_cache",
            "/resume",
            GENERATE,
            "/update_weight_version",
        ]
        assert (report.version, one.version) == (1, 1)
        labels = [
            body["new_version"] for route, body in server.asked if route == "/update_weight_version"
        ]
        assert labels[0] == "rollmatch-unverified" and labels[1].endswith("-1")
        assert asyncio.run(one.generate([make_request(0)]))[0].weight_version == 1

    @pytest.mark.slow
    def test_the_second_sync_goes_over_the_same_group(
        self, server: StockServer, url: str, expected: EngineSettings
    ) -> None:
        one = asyncio.run(started(url, expected))
        asyncio.run(synced(one, an_offer()))
        server.asked.clear()
        asyncio.run(synced(one, replace(an_offer(), version=2)))
        assert "/init_weight_transfer_engine" not in server.routes

    def test_each_server_joins_its_own_group_at_rank_one(
        self, server: StockServer, url: str, expected: EngineSettings
    ) -> None:
        terms = make_offer(num_groups=2).terms
        one = StockClient("server-1", make_address(url, kind="vllm"), index=1, expected=expected)
        asyncio.run(one.start())
        asyncio.run(synced(one, replace(an_offer(), terms=terms)))
        (info,) = [
            body["init_info"]
            for route, body in server.asked
            if route == "/init_weight_transfer_engine"
        ]
        assert (info["master_port"], info["rank_offset"], info["world_size"]) == (29501, 1, 2)

    @pytest.mark.slow
    def test_a_canary_that_differs_leaves_nothing_served(
        self, url: str, expected: EngineSettings
    ) -> None:
        one = asyncio.run(started(url, expected))
        wrong = replace(an_offer(), canary=CanaryProbe((1, 2), (), (1, 2, 7), (-0.5, -0.6), 1e-4))
        with pytest.raises(WeightSyncError, match="canary on server-0"):
            asyncio.run(synced(one, wrong))
        with pytest.raises(RolloutError, match="was not completed"):
            asyncio.run(one.generate([make_request(0)]))

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("learners", "what"),
        [([-0.5, -0.6], "differ"), ([], "need one log-probability less, not 0")],
    )
    def test_the_canarys_log_probabilities_may_come_behind_the_weights(
        self,
        server: StockServer,
        url: str,
        expected: EngineSettings,
        learners: list[float],
        what: str,
    ) -> None:
        pending = replace(an_offer(), canary=CanaryProbe((1, 2), (), (1, 2, 7), None, 1e-4))
        one = asyncio.run(started(url, expected))
        server.learners = [-0.5, -0.5]
        assert asyncio.run(synced(one, pending)).canary_max_abs == 0
        server.learners = learners
        with pytest.raises(WeightSyncError, match=f"canary on server-0: .*{what}"):
            asyncio.run(synced(one, pending))

    def test_a_server_that_fails_a_phase_is_named_with_its_url_and_what_it_said(
        self, server: StockServer, url: str, expected: EngineSettings
    ) -> None:
        one = asyncio.run(started(url, expected))
        server.closed["/init_weight_transfer_engine"] = 500
        with pytest.raises(
            WeightSyncError,
            match=f"rendezvous on server-0.*{url} /init_weight_transfer_engine: HTTP 500: closed",
        ):
            asyncio.run(synced(one, an_offer()))
        assert server.routes[-1] == "/collective_rpc abandon_update"

    def test_an_adapter_alone_is_refused_with_the_mode_that_works(
        self, url: str, expected: EngineSettings
    ) -> None:
        one = asyncio.run(started(url, expected))
        terms = AdapterOffer.make(AdapterFiles(b"", "{}"), timeout_s=5.0)
        with pytest.raises(WeightSyncError, match=r"sync\.mode: full"):
            asyncio.run(
                synced(
                    one,
                    replace(an_offer(), transport=TransportKind.ADAPTER, terms=terms),
                )
            )


def test_a_spec_travels_to_an_actor_and_makes_a_client_there(
    url: str, expected: EngineSettings
) -> None:
    spec = ServerEngineSpec("server-0", make_address(url, kind="vllm"), 0, expected)
    assert asyncio.run(pickle.loads(pickle.dumps(spec))().start()) == 1


def test_the_documentation_names_every_argument_and_variable_of_the_command(
    expected: EngineSettings,
) -> None:
    text = DOC.read_text()
    full = replace(expected, repeat_guard=GUARD, kv_cache_memory_bytes=1)
    flags = [part for part in stock_arguments(full) if part.startswith("--")]
    assert [name for name in (*flags, *stock_environment(full)) if name not in text] == []


@pytest.mark.engine
def test_requests_and_engine_are_those_of_an_engine_of_this_machine(
    expected: EngineSettings,
) -> None:
    """What JSON makes of the same fields; and flags, which say an engine's arguments in another
    way.
    """
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from rollout_actors.engine.sampling import PROBE_FIELDS, sampling_fields
    from rollout_actors.engine.vllm_io import probe_params, sampling_params

    decode = replace(make_request(0).decode, banned_token_ids=(5, 6), top_k=4)
    for fields, own in (
        (sampling_fields(decode, 3), sampling_params(decode, 3)),
        (PROBE_FIELDS, probe_params()),
    ):
        as_read = TypeAdapter(SamplingParams).validate_json(json.dumps(fields))
        as_read.output_kind = RequestOutputKind.FINAL_ONLY
        assert repr(as_read) == repr(own)

    full = replace(expected, repeat_guard=GUARD, kv_cache_memory_bytes=1 << 20)
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    of_server, *of_engine = stock_arguments(full)
    assert of_server == "--enable-scale-out"
    parsed = AsyncEngineArgs.from_cli_args(
        parser.parse_args(["--model", full.model_path, *of_engine])
    )
    for name, value in engine_arguments(full).items():
        if name in NOT_FLAGS:
            continue
        got = getattr(parsed, name)
        assert (got == value) or (
            name == "weight_transfer_config" and got.backend == value["backend"]
        ), name
