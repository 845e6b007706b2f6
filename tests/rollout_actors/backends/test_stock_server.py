"""The client of a stock `vllm serve`: what it asks, what it accepts, and what it says of a server
that was started otherwise.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import shlex
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from counted_time import later
from fake_server import Run, make_offer, make_request, make_settings, serving
from fake_stock_server import GENERATE, StockServer
from PIL import Image
from pydantic import TypeAdapter
from tiny_qwen import make_stock_model

from rollout_actors.backends.stock_server import (
    NOT_FLAGS,
    stock_arguments,
    stock_command,
    stock_environment,
)
from rollout_actors.engine.settings import EngineSettings, engine_arguments
from shared.errors import RolloutError, WeightSyncError
from shared.prompts import on_white
from shared.records import ImageRef
from shared.rollouts import FinishReason
from shared.tokens.repeat_guard import RepeatGuardSettings
from shared.weight_sync.canary import CanaryProbe
from shared.weight_sync.offer import AdapterFiles, AdapterOffer
from shared.weight_sync.phases import SyncPhase
from shared.weight_sync.transports import Device, TransportKind

DOC = Path(__file__).parents[3] / "docs" / "how_to" / "servers.md"
GUARD = RepeatGuardSettings(
    min_new_tokens=4,
    max_consecutive_token_repeats=3,
    ngram_size=2,
    ngram_repeats=3,
    max_object_keys=None,
)
OFFER = replace(make_offer(), canary=CanaryProbe((1, 2), (), (1, 2, 7), (-0.5, -0.5), 1e-4))


class StockRun(Run):
    def generate(self, *requests):
        return super().generate(*(requests or [make_request(0)]))

    def sync(self, offer=OFFER):
        return super().sync(offer)[-1]

    def sent_to(self, route, key):
        return [body[key] for asked, body in self.server.asked if asked == route]


@pytest.fixture
def expected(tmp_path):
    return make_settings(tmp_path / "model")


@pytest.fixture
def run(expected):
    server = StockServer()
    with serving(server.app()) as url:
        yield StockRun(url, expected, server, kind="vllm")


class TestStart:
    @pytest.mark.slow
    def test_a_suitable_server_gets_a_label_of_this_run_and_is_asked_to_go_on(self, run):
        routes = run.start().server.routes
        assert routes == ["/resume", "/update_weight_version", "/collective_rpc guard_by"]
        assert re.fullmatch("rollmatch-.+-0", run.server.label)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("route", "status", "said"),
        [
            (GENERATE, 401, r"server\.token_env"),
            (GENERATE, 403, "--enable-scale-out"),
            (GENERATE, 404, r"server\.kind"),
            ("/get_world_size", 404, "VLLM_SERVER_DEV_MODE=1"),
            ("/get_world_size", 500, "HTTP 500: closed"),
        ],
    )
    def test_a_closed_route_names_what_opens_it_and_the_servers_url_once(
        self, run, route, status, said
    ):
        run.server.closed[route] = status
        with pytest.raises(RolloutError, match=f"start on server-0: {run.url} .*{said}") as caught:
            run.start()
        assert str(caught.value).count(run.url) == 1

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"model_config.dtype": "torch.bfloat16"}, "--dtype float32"),
            ({"model_config.max_model_len": 32}, "--max-model-len 64"),
            ({"model_config.logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
            (
                {"model_config.hf_overrides": {"head_dtype": "float32"}},
                r"--hf-overrides '\{\"head_dtype\": \"model\"\}'",
            ),
            ({"model_config.multimodal_config": None}, "--limit-mm-per-prompt"),
            ({"scheduler_config.max_num_seqs": 4}, "--max-num-seqs 8"),
            ({"parallel_config.data_parallel_size": 2}, "--data-parallel-size 1"),
            ({"parallel_config.pipeline_parallel_size": 2}, "--pipeline-parallel-size 1"),
            (
                {"parallel_config.worker_extension_cls": ""},
                r"--worker-extension-cls rollout_actors\.weight_sync\.worker\.VerifyingWorker",
            ),
            (
                {"weight_transfer_config": None},
                r"--weight-transfer-config '\{\"backend\": \"rollmatch_gloo\"\}'",
            ),
            ({"weight_transfer_config": {"backend": "nccl"}}, "the server takes weights over nccl"),
            (
                {"model_config.dtype": "torch.bfloat16", "weight_transfer_config": None},
                r"--dtype float32; .*--weight-transfer-config",
            ),
        ],
    )
    def test_every_argument_that_is_missing_or_other_is_named(self, run, changes, said):
        run.server.changes = changes
        with pytest.raises(RolloutError, match=said):
            run.start()

    @pytest.mark.slow
    def test_a_server_without_the_runs_limit_of_pixels_is_refused_with_its_argument(
        self, run, tmp_path
    ):
        model = make_stock_model(tmp_path / "stock", "qwen3_vl")
        limits = {"size": {"shortest_edge": 4096, "longest_edge": 9216}}
        run.expected = replace(run.expected, model_path=str(model), max_pixels=9216)
        with pytest.raises(RolloutError, match="--mm-processor-kwargs '") as caught:
            run.start()
        assert f"'{json.dumps(limits)}'" in str(caught.value)
        assert json.dumps(limits) in stock_arguments(run.expected)
        images = {"limit_per_prompt": {"image": {"count": 1}}, "mm_processor_kwargs": limits}
        run.server.changes = {"model_config.multimodal_config": images}
        run.start()

    def test_a_guard_that_is_asked_for_and_not_there_ends_the_start(self, run):
        run.server.holds_guard = False
        missing = (
            r"has no repeat guard, which rollout_matching\.repeat_terminate requires: start the"
            r" server with --logits-processors rollout_actors"
        )
        with pytest.raises(RolloutError, match=missing):
            run.start(repeat_guard=GUARD)
        run.start()  # which needs none

    @pytest.mark.slow
    def test_the_runs_rule_comes_with_its_start_and_again_with_its_syncs(self, run):
        server = run.start(repeat_guard=GUARD).server
        assert server.guard == asdict(GUARD)
        StockRun(run.url, run.expected, server, kind="vllm").start()
        assert server.guard is None
        server.asked.clear()
        run.sync()
        assert server.guard == asdict(GUARD), "weights and rule are of one run"
        pause = server.routes.index("/pause?mode=wait&clear_cache=false")
        assert server.routes.index("/collective_rpc guard_by") == pause + 1

    @pytest.mark.slow
    def test_a_server_whose_workers_do_not_take_the_rule_is_waited_for_no_longer_than_a_phase(
        self, run
    ):
        async def limit_is_over_when_asked(work):
            asked = len(run.sent_to("/collective_rpc", "method"))
            task = asyncio.create_task(work)
            while run.sent_to("/collective_rpc", "method")[asked:] != ["guard_by"]:
                assert not task.done()
                await asyncio.sleep(0.01)
            with later(60.0):
                await asyncio.wait_for(task, 60)

        async def rendezvous():
            offer = replace(make_offer(timeout_s=60.0), canary=OFFER.canary)
            await client.run_sync_phase(SyncPhase.PAUSE, offer)
            await limit_is_over_when_asked(client.run_sync_phase(SyncPhase.RENDEZVOUS, offer))

        client = run.start(repeat_guard=GUARD).client
        run.server.guard_latency_s = 3600.0
        late = (
            r"rendezvous on server-0: .*no answer from its workers .*after timeouts\.sync_phase_s ="
            r" 60 s"
        )
        with pytest.raises(WeightSyncError, match=late):
            asyncio.run(rendezvous())
        late = r"start on server-0: .*after rollout_matching\.vllm\.server\.timeout_s = 60 s"
        with pytest.raises(RolloutError, match=late):
            asyncio.run(limit_is_over_when_asked(run.make(timeout_s=60.0).start()))

    @pytest.mark.slow
    @pytest.mark.parametrize("label", ["rollmatch-another-7", "rollmatch-unverified", "mine"])
    def test_the_weights_of_another_run_are_not_served(self, run, label):
        run.server.label = label
        run.start()
        with pytest.raises(RolloutError, match="has weights from another run"):
            run.generate()
        is_whole = "/collective_rpc abandon_update" in run.server.routes
        assert is_whole == (label == "rollmatch-unverified"), "a model in pieces is made whole"
        run.sync()
        assert run.generate()[0].weight_version == 1


def picture(mode, **options):
    image = Image.frombytes("RGB", (3, 2), bytes(range(0, 180, 10))).convert(mode)
    if mode == "RGBA":
        image.putalpha(100)
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return ImageRef(path=None, data=file.getvalue(), sha256="")


TURNED = Image.Exif()
TURNED[0x0112] = 6


class TestGenerate:
    def test_rollouts_are_read_with_the_stop_token_apart(self, run):
        first, second = run.start().generate(make_request(0), make_request(1))
        assert (first.prompt_token_ids, first.response_token_ids) == ((1, 2, 7), (3, 4))
        assert (first.stop_token_id, first.logprobs) == (9, (-0.375, -0.5))
        assert (first.stop_token_logprob, first.finish_reason) == (-1.125, FinishReason.STOP)
        assert (first.position, second.position, second.seed) == (0, 1, 101)
        assert (second.actor, second.attempt) == ("server-0", 0)

    def test_the_request_leaves_nothing_to_the_servers_defaults(self, run):
        image = picture("RGB")
        decode = replace(make_request(0).decode, banned_token_ids=(5,), top_k=4)
        run.start().generate(make_request(0, images=(image,), decode=decode))
        _, body = run.server.asked[-1]
        assert body["token_ids"] == [1, 2] and body["return_token_ids"]
        url = f"data:image/png;base64,{base64.b64encode(image.data).decode()}"
        assert body["content_parts"] == [{"type": "image_url", "url": url}]
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
    @pytest.mark.parametrize(
        "image",
        [
            picture("RGBA"),
            picture("L"),
            picture("RGB", exif=TURNED),
            picture("RGB", exif=b"Exif\0\0garbage"),
        ],
        ids=["transparent", "grey", "turned", "with damaged EXIF data"],
    )
    def test_an_image_that_the_server_would_read_otherwise_goes_as_the_pixels_of_the_learner(
        self, run, image
    ):
        run.start().generate(make_request(0, images=(image,)))
        (part,) = run.server.asked[-1][1]["content_parts"]
        sent = Image.open(io.BytesIO(base64.b64decode(part["url"].partition(",")[2])))
        assert (sent.mode, sent.getexif()) == ("RGB", {})
        assert sent.tobytes() == on_white(Image.open(io.BytesIO(image.data))).tobytes()

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("choice", "said"),
        [
            ({"finish_reason": "abort"}, "early with the reason 'abort'"),
            ({"weight_versions": [{"version": "default"}]}, r"labelled \['default'\]"),
            ({"weight_versions": None}, "labelled"),
            ({"logprobs": None}, "one log-probability for each"),
            (
                {"logprobs": {"content": [{"token_id": 3, "logprob": -9999.0}] * 3}},
                "minus infinity at token 0",
            ),
            (
                {"token_ids": "nonsense"},
                "check that it is `.*vllm serve .*`, and rollout_matching.vllm.server.kind",
            ),
            (
                {
                    "finish_reason": "length",
                    "token_ids": [5] * 6,
                    "logprobs": {"content": [{"token_id": 5, "logprob": -0.5}] * 6},
                },
                "was not active",  # the guard: a repetition has gone on
            ),
        ],
    )
    def test_what_is_no_whole_rollout_of_these_weights_is_refused(self, run, choice, said):
        run.start(repeat_guard=GUARD).server.choice = choice
        with pytest.raises(RolloutError, match=said):
            run.generate()


class TestSync:
    @pytest.mark.slow
    def test_the_phases_are_the_servers_own_routes_in_order_and_the_group_is_opened_once(self, run):
        run.start().server.asked.clear()
        report = run.sync()
        assert run.server.routes == [
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
        assert (report.version, run.client.version) == (1, 1)
        first, last = run.sent_to("/update_weight_version", "new_version")
        assert first == "rollmatch-unverified" and last.endswith("-1")
        assert run.generate()[0].weight_version == 1
        run.server.asked.clear()
        run.sync(replace(OFFER, version=2))
        assert "/init_weight_transfer_engine" not in run.server.routes

    def test_each_server_joins_its_own_group_at_rank_one(self, run):
        run.start(index=1).sync(replace(OFFER, terms=make_offer(num_groups=2).terms))
        (info,) = run.sent_to("/init_weight_transfer_engine", "init_info")
        assert (info["master_port"], info["rank_offset"], info["world_size"]) == (29501, 1, 2)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("learners", "what"),
        [([-0.5, -0.6], "differ"), ([], "need")],
    )
    def test_the_canarys_log_probabilities_may_come_behind_the_weights(self, run, learners, what):
        pending = replace(OFFER, canary=CanaryProbe((1, 2), (), (1, 2, 7), None, 1e-4))
        run.start().server.learners = [-0.5, -0.5]
        assert run.sync(pending).canary_max_abs == 0
        run.server.learners = learners
        with pytest.raises(WeightSyncError, match=f"canary on server-0: .*{what}"):
            run.sync(pending)
        with pytest.raises(RolloutError, match="did not complete"):
            run.generate()

    def test_a_server_that_fails_a_phase_is_named_with_its_url_and_what_it_said(self, run):
        route = "/init_weight_transfer_engine"
        run.start().server.closed[route] = 500
        failed = f"rendezvous on server-0.*{run.url} {route}: HTTP 500: closed"
        with pytest.raises(WeightSyncError, match=failed):
            run.sync()
        assert run.server.routes[-1] == "/collective_rpc abandon_update"

    def test_an_adapter_alone_is_refused_with_the_mode_that_works(self, run):
        terms = AdapterOffer.make(AdapterFiles(b"", "{}"), timeout_s=60.0)
        with pytest.raises(WeightSyncError, match=r"sync\.mode: full"):
            run.start().sync(replace(OFFER, transport=TransportKind.ADAPTER, terms=terms))


def test_the_page_shows_the_command_of_a_gpu_and_that_of_a_cpu():
    common = {
        "model_path": "FOLDER",
        "max_model_len": 4096,
        "max_num_seqs": 16,
        "seed": 0,
        "gpu_memory_utilization": 0.85,
    }
    on_gpu = EngineSettings(
        **common,
        dtype="bfloat16",
        transport=TransportKind.NCCL,
        device=Device.CUDA,
        enforce_eager=False,
    )
    on_cpu = EngineSettings(
        **common,
        dtype="float32",
        transport=TransportKind.GLOO,
        device=Device.CPU,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
    )
    blocks = re.findall(r"```\n(.*?)```", DOC.read_text(), re.DOTALL)
    shown = [shlex.split(block.replace("\\\n", "")) for block in blocks if "vllm serve" in block]
    assert shown == [
        shlex.split(stock_command(settings, "http://127.0.0.1:8000"))
        for settings in (on_gpu, on_cpu)
    ]


def test_the_documentation_names_every_argument_and_variable_of_the_command(expected):
    text = DOC.read_text()
    full = replace(expected, repeat_guard=GUARD, kv_cache_memory_bytes=1, head_dtype="float32")
    for settings in (full, replace(full, device=Device.CUDA)):
        flags = [part for part in stock_arguments(settings) if part.startswith("--")]
        assert [one for one in (*flags, *stock_environment(settings)) if one not in text] == []


def test_on_a_gpu_in_float32_the_command_has_triton_multiply_in_float32(expected):
    assert expected.dtype == "float32"
    on_gpu = replace(expected, device=Device.CUDA)
    assert " TRITON_F32_DEFAULT=ieee " in stock_command(on_gpu, "http://127.0.0.1:8000")


@pytest.mark.engine
def test_requests_and_engine_are_those_of_an_engine_of_this_machine(expected):
    """The same fields as JSON, and an engine's arguments as flags."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from rollout_actors.engine.sampling import PROBE_FIELDS, sampling_fields
    from rollout_actors.engine.vllm_io import probe_params, sampling_params

    decode = replace(make_request(0).decode, banned_token_ids=(5, 6), top_k=4)
    for fields, params in (
        (sampling_fields(decode, 3), sampling_params(decode, 3)),
        (PROBE_FIELDS, probe_params()),
    ):
        as_read = TypeAdapter(SamplingParams).validate_json(json.dumps(fields))
        as_read.output_kind = RequestOutputKind.FINAL_ONLY
        assert repr(as_read) == repr(params)

    full = replace(
        expected, repeat_guard=GUARD, kv_cache_memory_bytes=1 << 20, head_dtype="float32"
    )
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    server_flag, *engine_flags = stock_arguments(full)
    assert server_flag == "--enable-scale-out"
    parsed = AsyncEngineArgs.from_cli_args(
        parser.parse_args(["--model", full.model_path, *engine_flags])
    )
    for name, value in engine_arguments(full).items():
        if name in NOT_FLAGS:
            continue
        got = getattr(parsed, name)
        if name == "weight_transfer_config":
            got = {"backend": got.backend}
        assert got == value, name
