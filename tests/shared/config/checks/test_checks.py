"""Values that contradict each other, and values that a part of the system cannot do."""

from __future__ import annotations

import pytest

from shared.config.pipeline import EXAMPLE_PIPELINE, EXAMPLE_POLICY_GRADIENT

MATCHING = "rollout_matching"
VLLM = f"{MATCHING}.vllm"
OBJECTIVE = f"{MATCHING}.pipeline.objective"
STAGE1 = {"custom.trainer_variant": "stage1_sft"}
NO_QUEUE = {"stage2_ab.channel_b.enable_pipeline": False}
LORA = {"model.adapter": {"kind": "lora"}}
SERVER = {"base_url": "http://127.0.0.1:8000", "group_port": 0}

TOKEN_CE = EXAMPLE_PIPELINE["objective"][0]
SAMPLED = {f"{MATCHING}.decoding.temperature": 0.7}

REFUSED = [
    (
        {"training.eval_steps": 20, "data.val": ...},
        (
            "training.eval_steps: 20 asks for reports on held-out samples, and data.val is not set;"
            " set data.val to a JSONL file, or training.eval_steps: null"
        ),
    ),
    (
        {"checkpoint.keep_best": 2, "data.val": ...},
        (
            "checkpoint.keep_best: 2 asks for reports on held-out samples, and data.val is not set;"
            " set data.val to a JSONL file, or checkpoint.keep_best: 0"
        ),
    ),
    (
        {f"{VLLM}.tensor_parallel_size": 2},
        (
            f"{VLLM}.tensor_parallel_size: 2 is for mode colocate; set"
            f" {VLLM}.actors.tensor_parallel_size, and remove this key"
        ),
    ),
    (
        {
            f"{VLLM}.tensor_parallel_size": 2,
            f"{VLLM}.mode": "server",
            f"{VLLM}.server": {"servers": [SERVER]},
        },
        (
            f"{VLLM}.tensor_parallel_size: 2 is for mode colocate; start the servers with"
            " tensor_parallel_size, and remove this key"
        ),
    ),
    (
        {f"{MATCHING}.decoding.temperature": 2.5},
        (
            f"{MATCHING}.decoding.temperature: 2.5 is above 2, the highest at which vLLM samples;"
            f" lower it, or set {MATCHING}.rollout_backend: hf"
        ),
    ),
    (
        {**NO_QUEUE, **LORA, f"{MATCHING}.rollout_backend": "hf", f"{VLLM}.enable_lora": True},
        (
            f"{VLLM}.enable_lora: true, and rollout_backend hf has no engine that takes adapters;"
            " remove the key, or set rollout_backend: vllm"
        ),
    ),
    (
        {**NO_QUEUE, **LORA, f"{MATCHING}.rollout_backend": "hf", f"{VLLM}.sync.mode": "adapter"},
        (
            f"{VLLM}.sync.mode: 'adapter', and rollout_backend hf has no engine that takes"
            " adapters; remove the key, or set rollout_backend: vllm"
        ),
    ),
    (
        {**NO_QUEUE, f"{MATCHING}.max_staleness": 1},
        (
            f"{MATCHING}.max_staleness: 1 lets the queue between generation and learning run on"
            " into the next step, and there is no queue; set "
        ),
    ),
    ({f"{MATCHING}.max_staleness": 2}, f"{MATCHING}.max_staleness: must be at most 1, got 2; "),
    (
        {f"{VLLM}.enable_lora": True},
        (
            f"{VLLM}.enable_lora: true, and the learner trains no adapter; set model.adapter, or"
            " remove the key"
        ),
    ),
    (
        {"model.adapter": {"kind": "lora", "rank": 513}, f"{VLLM}.enable_lora": True},
        (
            "model.adapter.rank: 513 is more than the 512 that vLLM serves; lower it, or set"
            f" {VLLM}.enable_lora: false"
        ),
    ),
    (
        {**LORA, f"{VLLM}.sync.mode": "adapter"},
        (
            f"{VLLM}.sync.mode: 'adapter' needs engines that serve adapters; set"
            f" {VLLM}.enable_lora: true"
        ),
    ),
    (
        {
            "model.adapter": {"kind": "dora"},
            f"{VLLM}.enable_lora": True,
            f"{VLLM}.sync.mode": "adapter",
        },
        (
            f"{VLLM}.sync.mode: 'adapter' cannot carry DoRA, which vLLM does not serve unmerged;"
            f" set {VLLM}.sync.mode: full or auto"
        ),
    ),
    (
        {
            **LORA,
            f"{VLLM}.enable_lora": True,
            f"{VLLM}.mode": "server",
            f"{VLLM}.server": {"servers": [SERVER], "kind": "vllm"},
        },
        (
            f"{VLLM}.enable_lora: true, and a stock vllm serve takes no adapter alone; remove the"
            f" key, or set {VLLM}.server.kind: rollmatch"
        ),
    ),
    *(
        (
            {
                **LORA,
                f"{VLLM}.enable_lora": True,
                f"{VLLM}.sync.mode": mode,
                "learner.world_size": 2,
            },
            (
                f"{VLLM}.sync.mode: '{mode}' sends adapters alone, which works with one learner"
                f" rank only, not 2; set {VLLM}.sync.mode: full, or learner.world_siz"
            ),
        )
        for mode in ("adapter", "auto")
    ),
    ({"model.adapter": {}}, "model.adapter.kind: is required, and missing; "),
    (
        {f"{VLLM}.mode": "server"},
        f"{VLLM}.server: is required by vllm.mode server, and missing; add it, for example ",
    ),
    (
        {f"{VLLM}.server": {"servers": []}},
        f"{VLLM}.server.servers: must list at least one server, got an empty list; write ",
    ),
    (
        {f"{VLLM}.server": {"servers": [SERVER, SERVER]}},
        f"{VLLM}.server.servers: http://127.0.0.1:8000 is listed twice; list every server once",
    ),
    (
        {f"{VLLM}.server": {"servers": [SERVER, SERVER | {"base_url": "http://localhost:8000"}]}},
        (
            f"{VLLM}.server.servers: http://localhost:8000 is listed twice, as"
            " http://127.0.0.1:8000 too; list every server once"
        ),
    ),
    (
        {
            f"{VLLM}.server": {
                "servers": [SERVER | {"base_url": "http://A"}, SERVER | {"base_url": "http://a:80"}]
            }
        },
        (
            f"{VLLM}.server.servers: http://a:80 is listed twice, as http://A too; list every"
            " server once"
        ),
    ),
    (
        {
            f"{VLLM}.server": {
                "servers": [
                    SERVER | {"group_port": 51216},
                    SERVER | {"base_url": "http://b:8000", "group_port": 51216},
                ]
            }
        },
        (
            f"{VLLM}.server.servers: group_port 51216 is listed twice; give every server its own,"
            " or 0 for any free one"
        ),
    ),
    (
        {f"{VLLM}.server": {"servers": [{"group_port": 51216}]}},
        f"{VLLM}.server.servers[0].base_url: is required, and missing; ",
    ),
    (
        {f"{VLLM}.server": {"servers": [{"base_url": "http://a:1"}]}},
        f"{VLLM}.server.servers[0].group_port: is required, and missing; ",
    ),
    (
        {f"{VLLM}.server": {"servers": [SERVER | {"base_url": "127.0.0.1:8000"}]}},
        f"{VLLM}.server.servers[0].base_url: must be an http(s) URL",
    ),
    *(
        (
            {f"{VLLM}.server": {"servers": [SERVER | {"base_url": url}]}},
            f"{VLLM}.server.servers[0].base_url: {wrong}",
        )
        for url, wrong in (
            (
                "http://127.0.0.1:99999",
                (
                    "must be an http(s) URL, got 'http://127.0.0.1:99999': Port out of range"
                    " 0-65535; write it as http://127.0.0.1:8000"
                ),
            ),
            (
                "http://127.0.0.1:abc",
                (
                    "must be an http(s) URL, got 'http://127.0.0.1:abc': Port could not be cast to"
                    " integer value as 'abc'; write it as "
                ),
            ),
            (
                "http://127.0.0.1:0",
                (
                    "must name a port that can be called, got 'http://127.0.0.1:0'; write it as"
                    " http://127.0.0.1:8000"
                ),
            ),
            (
                "http://[::1",
                "must be an http(s) URL, got 'http://[::1': Invalid IPv6 URL; write it as ",
            ),
            ("http://a..b:8000", "must be an http(s) URL, got 'http://a..b:8000': "),
            (
                "http://a b:8000",
                "must be an http(s) URL without query, got 'http://a b:8000'; write it as ",
            ),
            (
                "http://user:secret@a:99999",
                (
                    "must hold no user and password, which no server is sent; write it without, and"
                    " name "
                ),
            ),
        )
    ),
    (
        {f"{VLLM}.server": {"servers": [SERVER | {"unknown_flag": True}]}},
        f"{VLLM}.server.servers[0].unknown_flag: is not a known key; ",
    ),
    (
        {f"{MATCHING}.repeat_terminate": {"ngram_repeats": 1}},
        f"{MATCHING}.repeat_terminate.ngram_repeats: must be at least 2, got 1; ",
    ),
    (
        {f"{MATCHING}.decode_mode": "sample"},
        (
            f"{MATCHING}.decode_mode: 'sample' contradicts decoding.temperature 0, which is greedy;"
            " raise "
        ),
    ),
    (
        {f"{MATCHING}.decode_mode": "greedy", f"{MATCHING}.decoding.temperature": 0.7},
        (
            f"{MATCHING}.decode_mode: 'greedy' contradicts decoding.temperature 0.7, which is"
            " sampling; set "
        ),
    ),
    ({f"{MATCHING}.num_beams": 4}, f"{MATCHING}.num_beams: 4 beams need decode_mode: beam; "),
    (
        {"global_max_length": 160},
        (
            "global_max_length: 160 tokens leave no room for a prompt beside"
            " rollout_matching.max_new_tokens 160; raise "
        ),
    ),
    (
        {f"{VLLM}.max_model_len": 2047},
        f"{VLLM}.max_model_len: 2047 is less than global_max_length 2048",
    ),
    (
        {"training.gradient_accumulation_steps": 8},
        (
            "training.gradient_accumulation_steps: 8 contradicts effective_batch_size 32, which"
            " takes 32 with 1 per device and 1 learner ranks; remove one"
        ),
    ),
    (
        {"training.packing_buffer": 31},
        (
            "training.packing_buffer: 31 segments cannot hold a whole step (32 samples on channel"
            " A, 32 raw rollouts on channel B); raise it to at least 32"
        ),
    ),
    (
        {"training.packing_buffer": 40, "stage2_ab.channel_b.rollouts_per_step": 48},
        (
            "training.packing_buffer: 40 segments cannot hold a whole step (32 samples on channel"
            " A, 48 raw rollouts on channel B); raise it to at least 48"
        ),
    ),
    (
        {"training.packing_buffer": 15, "learner.world_size": 2},
        (
            "training.packing_buffer: 15 segments cannot hold a learner rank's share of a step, of"
            " 2 ranks (16 samples on channel A, 16 raw rollouts on channel B)"
        ),
    ),
    (
        {"training.effective_batch_size": 300, "training.per_device_train_batch_size": 8},
        (
            "training.packing_buffer: 256 segments cannot hold a whole step (304 samples on"
            " channel A, "
        ),
    ),
    (
        {f"{VLLM}.actors.tensor_parallel_size": 2, f"{VLLM}.actors.gpus_per_actor": 1.0},
        (
            f"{VLLM}.actors.gpus_per_actor: 1 GPUs cannot hold an engine of tensor_parallel_size 2;"
            " set it to 2, or remove the key"
        ),
    ),
    (
        {f"{VLLM}.actors.gpus_per_actor": 2.0},
        (
            f"{VLLM}.actors.gpus_per_actor: 2 GPUs are reserved for an engine of"
            f" tensor_parallel_size 1; set {VLLM}.actors.tensor_parallel_size: 2 for engi"
        ),
    ),
    (
        {f"{VLLM}.server": {"servers": [SERVER]}},
        (
            f"{VLLM}.server: has no effect: under vllm.mode actors nobody asks a server; set"
            f" {VLLM}.mode: server, or remove the section"
        ),
    ),
    *(
        (
            {**changes, f"{MATCHING}.max_staleness": 1},
            (
                f"{MATCHING}.max_staleness: 1 has no effect: the queue runs on from a channel-B"
                " step into the next one, and no two of them are in a row; set max"
            ),
        )
        for changes in (STAGE1, {"stage2_ab.schedule.b_ratio": 0.5})
    ),
    (
        {f"{OBJECTIVE}[0].channels": ["A"], f"{OBJECTIVE}[1].channels": ["A"]},
        (
            f"{OBJECTIVE}: no enabled entry with a weight above 0, its own and a term's, covers"
            " channel B, "
        ),
    ),
    (
        {f"{OBJECTIVE}[0].channels": ["B"], f"{OBJECTIVE}[1].weight": 0.0},
        (
            f"{OBJECTIVE}: no enabled entry with a weight above 0, its own and a term's, covers"
            " channel A, "
        ),
    ),
]

ACCEPTED = [
    {"learner.world_size": 2, "learner.parallel": "fsdp"},
    {f"{MATCHING}.max_staleness": 1},
    {f"{MATCHING}.max_staleness": 1, "stage2_ab.schedule.b_ratio": 0.51},
    {**NO_QUEUE, f"{VLLM}.mode": "colocate", f"{VLLM}.server": {"servers": [SERVER]}},
    {**NO_QUEUE, f"{MATCHING}.rollout_backend": "hf"},
    {**NO_QUEUE, f"{VLLM}.mode": ...},
    {**NO_QUEUE, **STAGE1, f"{VLLM}.mode": "colocate", f"{VLLM}.tensor_parallel_size": 2},
    {
        **NO_QUEUE,
        f"{MATCHING}.rollout_backend": "hf",
        f"{MATCHING}.decode_mode": "beam",
        f"{MATCHING}.num_beams": 4,
    },
    {
        **NO_QUEUE,
        f"{VLLM}.mode": "colocate",
        f"{MATCHING}.decode_mode": "beam",
        f"{MATCHING}.num_beams": 4,
    },
    {
        f"{VLLM}.mode": "server",
        f"{VLLM}.server": {
            "servers": [SERVER, SERVER | {"base_url": "https://b.example/rollouts"}],
            "infer_timeout_s": None,
        },
    },
    {
        f"{VLLM}.mode": "server",
        f"{VLLM}.server": {"servers": [SERVER | {"base_url": "http://[fe80::1%25eth0]:8000/a_b/"}]},
    },
    {
        f"{VLLM}.mode": "server",
        f"{VLLM}.server": {
            "servers": [SERVER],
            "kind": "vllm",
            "timeout_s": 10,
            "infer_timeout_s": -1,
        },
    },
    {f"{VLLM}.sync.mode": "auto"},
    {"checkpoint.keep_best": 2},
    {**NO_QUEUE, f"{MATCHING}.rollout_backend": "hf", f"{VLLM}.sync.mode": "auto", **LORA},
    {**LORA, "learner.world_size": 2},
    {**LORA, f"{VLLM}.enable_lora": True, f"{VLLM}.sync.mode": "adapter"},
    {
        "model.adapter": {"kind": "dora"},
        f"{VLLM}.enable_lora": True,
        f"{VLLM}.sync.mode": "auto",
        "learner.world_size": 2,
    },
    {f"{MATCHING}.repeat_terminate": {"enabled": True, "max_object_keys": 100}},
    {f"{MATCHING}.offload": {"enabled": True, "offload_model": True}},
    {"data.val": ...},
    {"training.eval_steps": 1000},
    {f"{MATCHING}.decode_mode": "greedy"},
    {f"{MATCHING}.decode_mode": "sample", f"{MATCHING}.decoding.temperature": 1.0},
    {f"{VLLM}.max_model_len": 2048},
    {"training.gradient_accumulation_steps": 32},
    {
        "training.effective_batch_size": 33,
        "training.per_device_train_batch_size": 8,
        "training.gradient_accumulation_steps": 5,
    },
    {"training.packing_buffer": 7, "training.packing": False},
    {"training.packing_buffer": 32},
    {"training.packing_buffer": 16, "learner.world_size": 2},
    {"training.packing_buffer": 32, "training.packing_window": 64},
    {**STAGE1, "training.packing_buffer": 32, "stage2_ab.channel_b.rollouts_per_step": 48},
    *(
        {f"{MATCHING}.decoding.temperature": temperature}
        for temperature in (0, 0.001, 0.01, 2, 2.0)
    ),
    {**NO_QUEUE, f"{MATCHING}.rollout_backend": "hf", f"{MATCHING}.decoding.temperature": 5.0},
    {**SAMPLED, f"{MATCHING}.decoding.top_k": 0},
    {**NO_QUEUE, f"{VLLM}.mode": "colocate", f"{MATCHING}.offload.enabled": True},
    {
        "learner.gpus": 1,
        f"{VLLM}.actors": {"gpus_per_actor": 2.0, "tensor_parallel_size": 2, "num_actors": 3},
    },
    {"learner.cpus": 0.5, f"{VLLM}.actors.cpus_per_actor": 0.5},
    {"learner.gpus": 0.0, f"{VLLM}.actors.gpus_per_actor": 0},
    {f"{OBJECTIVE}[0].channels": ["A"], f"{OBJECTIVE}[2]": TOKEN_CE | {"channels": ["B"]}},
    {f"{OBJECTIVE}[2]": TOKEN_CE | {"channels": ["A", "B"], "enabled": False}},
    {
        f"{OBJECTIVE}[2]": EXAMPLE_POLICY_GRADIENT | {"enabled": False},
        **SAMPLED,
        f"{MATCHING}.decoding.top_p": 0.9,
        f"{MATCHING}.decoding.top_k": 50,
    },
    {**SAMPLED, f"{MATCHING}.repetition_penalty": 1.1},
    {
        "training.max_steps": 10,
        "stage2_ab.schedule.warmup_steps": 400,
        "training.lr_warmup_steps": 50,
    },
    {
        f"{OBJECTIVE}[0].channels": ["A"],
        f"{OBJECTIVE}[1].channels": ["A"],
        "stage2_ab.schedule.b_ratio": 0.0,
    },
    {
        f"{OBJECTIVE}[0].channels": ["B"],
        f"{OBJECTIVE}[1].channels": ["B"],
        "stage2_ab.schedule.warmup_steps": 0,
    },
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_contradictions_and_what_a_part_cannot_do_are_refused(problems, changes, message):
    (line,) = problems(changes)
    assert line.startswith(message)
    assert "; " in line


@pytest.mark.parametrize("changes", ACCEPTED)
def test_values_that_agree_are_accepted(problems, changes):
    assert problems(changes) == []


@pytest.mark.parametrize(
    ("channels", "twice"), [(["A"], "A"), (["B"], "B"), (["B", "A"], "B and A")]
)
def test_a_module_is_active_once_per_channel(problems, channels, twice):
    (line,) = problems({f"{OBJECTIVE}[2]": TOKEN_CE | {"channels": channels}})
    assert line.startswith(
        f"{OBJECTIVE}[2].name: 'token_ce' is active on channel {twice} already, by {OBJECTIVE}[0];"
        " remove or disable one of the two"
    )


def test_a_diagnostic_is_active_once_per_channel_too(problems):
    entry = {
        "name": "coord_diag",
        "enabled": True,
        "weight": 1.0,
        "channels": ["A", "B"],
        "config": {},
    }
    path = f"{MATCHING}.pipeline.diagnostics"
    assert (
        problems(
            {
                path: [
                    entry | {"channels": ["A"]},
                    entry | {"channels": ["B"]},
                    entry | {"enabled": False},
                ]
            }
        )
        == []
    )
    (line,) = problems({path: [entry, entry | {"channels": ["B"]}]})
    assert line.startswith(
        f"{path}[1].name: 'coord_diag' is active on channel B already, by {path}[0]; "
    )


def test_every_further_entry_of_a_module_is_reported_once(problems):
    lines = problems({f"{OBJECTIVE}[2]": TOKEN_CE, f"{OBJECTIVE}[3]": TOKEN_CE})
    assert [line.split(": ")[0] for line in lines] == [
        f"{OBJECTIVE}[2].name",
        f"{OBJECTIVE}[3].name",
    ]


def test_beam_search_is_refused_for_actors_and_the_modes_that_have_it_are_named(problems):
    (line,) = problems({f"{MATCHING}.decode_mode": "beam", f"{MATCHING}.num_beams": 4})
    assert line.startswith(
        f"{MATCHING}.decode_mode: vllm.mode actors has no beam search; set"
        f" {MATCHING}.rollout_backend: hf or {VLLM}.mode: colocate"
    )


def test_vllms_beams_are_not_guarded_and_transformers_are(problems):
    beams = {
        **NO_QUEUE,
        f"{MATCHING}.decode_mode": "beam",
        f"{MATCHING}.num_beams": 4,
        f"{MATCHING}.repeat_terminate.enabled": True,
    }
    (line,) = problems({**beams, f"{VLLM}.mode": "colocate"})
    assert line.startswith(f"{MATCHING}.repeat_terminate.enabled: true, and vLLM's beam search")
    assert problems({**beams, f"{MATCHING}.rollout_backend": "hf"}) == []


BEAM = {**NO_QUEUE, f"{MATCHING}.decode_mode": "beam"}


def test_transformers_search_no_more_beams_than_one_device_decodes_sequences(problems):
    hf = {**BEAM, f"{MATCHING}.rollout_backend": "hf", f"{MATCHING}.decode_batch_size": 4}
    assert problems({**hf, f"{MATCHING}.num_beams": 4}) == []
    (line,) = problems({**hf, f"{MATCHING}.num_beams": 5})
    assert line.startswith(
        f"{MATCHING}.num_beams: 5 beams of one rollout are more than the 4 sequences that 'hf'"
        " decodes at a time; "
    )
    assert line.endswith(f"set {MATCHING}.decode_batch_size to at least 5, or lower num_beams")


def test_vllm_searches_no_more_beams_than_its_engines_give_log_probabilities_for(problems):
    colocate = {**BEAM, f"{VLLM}.mode": "colocate", f"{MATCHING}.decode_batch_size": 4}
    assert problems({**colocate, f"{MATCHING}.num_beams": 10}) == [], (
        "the engine's scheduler keeps to the bound: beams are requests of their own"
    )
    (line,) = problems({**colocate, f"{MATCHING}.num_beams": 11})
    assert (
        line
        == f"{MATCHING}.num_beams: 11 is more than the 10 beams of vLLM's search; lower it, or set"
        f" {MATCHING}.rollout_backend: hf"
    )
    enough = {
        f"{MATCHING}.rollout_backend": "hf",
        f"{MATCHING}.decode_batch_size": 11,
        f"{MATCHING}.num_beams": 11,
    }
    assert problems({**BEAM, **enough}) == []


def test_a_sharded_model_does_not_generate(problems):
    (line,) = problems(
        {
            **NO_QUEUE,
            f"{MATCHING}.rollout_backend": "hf",
            "learner.parallel": "fsdp",
            "learner.world_size": 2,
        }
    )
    assert line.startswith(
        f"{MATCHING}.rollout_backend: 'hf' generates with the learner's own model"
    )
    assert line.endswith(f"set learner.parallel: ddp, or {MATCHING}.rollout_backend: vllm")


def test_beams_contradict_a_temperature_and_one_beam_is_none(problems):
    lines = problems({f"{MATCHING}.decode_mode": "beam", f"{MATCHING}.decoding.temperature": 1.0})
    assert [line.split(": ")[0] for line in lines] == [
        f"{MATCHING}.decode_mode",
        f"{MATCHING}.decode_mode",
        f"{MATCHING}.num_beams",
    ]


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({f"{VLLM}.mode": "colocate"}, "vllm.mode colocate"),
        ({f"{MATCHING}.rollout_backend": "hf"}, "rollout_backend hf"),
    ],
)
def test_the_in_step_queue_needs_dedicated_devices(problems, changes, where):
    (line,) = (
        line
        for line in problems(changes)
        if line.startswith("stage2_ab.channel_b.enable_pipeline: ")
    )
    assert f"dedicated devices, which {where} does not have; set " in line
    assert f"{VLLM}.mode: server or actors" in line


def test_a_decode_batch_that_leaves_a_learner_rank_without_rollouts_is_refused(problems):
    lines = problems({"learner.world_size": 4, f"{MATCHING}.decode_batch_size": 1})
    (line,) = (line for line in lines if line.startswith(f"{MATCHING}.decode_batch_size: "))
    assert line.endswith(
        "raise decode_batch_size to at least 2, add rollout devices, or use fewer learner ranks"
    )
