"""Values that contradict each other, and values that a part of the system cannot do."""

from __future__ import annotations

import pytest
from config_changes import (
    COLOCATE,
    COORD_DIAG,
    DECODE_MODE,
    DIAGNOSTICS,
    HF,
    LORA,
    MATCHING,
    NO_QUEUE,
    OBJECTIVE,
    SERVED_LORA,
    SERVER,
    SERVERS,
    STAGE1,
    TEMPERATURE,
    TOKEN_CE,
    VLLM,
    fits,
    problems,
)

from shared.config.pipeline import EXAMPLE_POLICY_GRADIENT

ACTORS = f"{VLLM}.actors"
LISTED = f"{VLLM}.server.servers"
SYNC = f"{VLLM}.sync.mode"
BEAMS = f"{MATCHING}.num_beams"
BEAM = {DECODE_MODE: "beam", BEAMS: 4}
GUARD = f"{MATCHING}.repeat_terminate"
PARTS = "training.parts"
FROZEN = {f"{PARTS}.{part}.frozen": True for part in ("vision_tower", "aligner", "language_model")}
BUFFER = "training.packing_buffer"
QLORA = {"model.adapter": {"kind": "lora", "quantize": "nf4"}}
STALENESS = f"{MATCHING}.max_staleness"
NO_TEACHER = f"{OBJECTIVE}: no enabled entry with a weight above 0, its own and a term's, covers"


def listing(*servers):
    return {f"{VLLM}.server": {"servers": list(servers)}}


def at(url):
    return SERVER | {"base_url": url}


REFUSED = [
    # Memory.
    (
        {"model.activation_offload": True},
        "model.activation_offload: true, and only what ... checkpointing: true, or this to false",
    ),
    *(
        (
            {"training.optimizer": name, "learner.world_size": 2, "learner.parallel": "fsdp"},
            f"training.optimizer: '{name}' has no moments of shards ... , or learner.parallel: ddp",
        )
        for name in ("adamw_bnb_8bit", "adamw_offload")
    ),
    # Reports.
    (
        {"training.eval_steps": 20, "data.val": ...},
        (
            "training.eval_steps: 20 asks for reports on held-out samples, and data.val is not set; set"
            " data.val to a JSONL file, or training.eval_steps: null"
        ),
    ),
    ({"training.eval_steps": 10, "data.val": None}, "training.eval_steps: 10 asks for reports"),
    ({"checkpoint.keep_best": 2, "data.val": ...}, "checkpoint.keep_best: 2 ... keep_best: 0"),
    # Engines.
    (
        {f"{VLLM}.tensor_parallel_size": 2},
        (
            f"{VLLM}.tensor_parallel_size: 2 is for mode colocate; set {ACTORS}.tensor_parallel_size,"
            " and remove this key"
        ),
    ),
    (
        {f"{VLLM}.tensor_parallel_size": 2, **SERVERS},
        f"{VLLM}.tensor_parallel_size: 2 is for mode colocate; start the servers with",
    ),
    (
        {TEMPERATURE: 2.5},
        f"{TEMPERATURE}: 2.5 is above 2, the ... set {MATCHING}.rollout_backend: hf",
    ),
    (
        {f"{VLLM}.max_model_len": 2047},
        f"{VLLM}.max_model_len: 2047 is less than global_max_length 2048",
    ),
    (
        {"global_max_length": 160},
        "global_max_length: 160 tokens have no room for a prompt and max_new_tokens 160; raise it",
    ),
    (
        {f"{ACTORS}.tensor_parallel_size": 2, f"{ACTORS}.gpus_per_actor": 1.0},
        f"{ACTORS}.gpus_per_actor: 1 GPUs for an engine of tensor_parallel_size 2; set it to 2",
    ),
    (
        {f"{ACTORS}.gpus_per_actor": 2.0},
        (
            f"{ACTORS}.gpus_per_actor: 2 GPUs for an engine of tensor_parallel_size 1; set it to 1, set"
            f" {ACTORS}.tensor_parallel_size: 2, or"
        ),
    ),
    (
        {**HF, "learner.parallel": "fsdp", "learner.world_size": 2},
        (
            f"{MATCHING}.rollout_backend: 'hf' generates with the learner's own model, of which each of"
            f" 2 ranks ... set learner.parallel: ddp, or {MATCHING}.rollout_backend: vllm"
        ),
    ),
    (
        {"learner.world_size": 4, f"{MATCHING}.decode_batch_size": 1},
        (
            f"{MATCHING}.decode_batch_size:  ... raise decode_batch_size to at least 2, add rollout"
            " devices, or use fewer learner ranks"
        ),
    ),
    # Adapters.
    (
        {**HF, **SERVED_LORA},
        f"{VLLM}.enable_lora: true, and rollout_backend hf has no engine ... rollout_backend: vllm",
    ),
    ({**HF, **LORA, SYNC: "adapter"}, f"{SYNC}: 'adapter', and rollout_backend hf has no engine"),
    (
        {f"{VLLM}.enable_lora": True},
        f"{VLLM}.enable_lora: true, and the learner trains no adapter; set model.adapter",
    ),
    (
        {"model.adapter": {"kind": "lora", "rank": 513}, f"{VLLM}.enable_lora": True},
        "model.adapter.rank: 513 is more than the 512 that vLLM serves; lower it",
    ),
    ({"model.adapter": {}}, "model.adapter.kind: is required, and missing; "),
    (
        {**LORA, SYNC: "adapter"},
        f"{SYNC}: 'adapter' needs engines that serve adapters; set {VLLM}.enable_lora: true",
    ),
    (
        {"model.adapter": {"kind": "dora"}, f"{VLLM}.enable_lora": True, SYNC: "adapter"},
        f"{SYNC}: 'adapter' cannot carry DoRA, which ... {SYNC}: full or auto",
    ),
    (
        {**SERVED_LORA, **SERVERS, f"{VLLM}.server.kind": "vllm"},
        f"{VLLM}.enable_lora: true, and a stock vllm serve takes ... server.kind: rollmatch",
    ),
    # Servers.
    (
        {f"{VLLM}.mode": "server"},
        f"{VLLM}.server: is required by vllm.mode server, and missing; add it, for example ",
    ),
    (
        listing(SERVER),
        f"{VLLM}.server: has no effect ... {VLLM}.mode: server, or remove the section",
    ),
    (listing(), f"{LISTED}: must list at least one server, got an empty list; write "),
    (listing(SERVER, SERVER), f"{LISTED}: http://127.0.0.1:8000 is listed twice; list every"),
    (
        listing(SERVER, at("http://localhost:8000")),
        f"{LISTED}: http://localhost:8000 is listed twice, as http://127.0.0.1:8000 too; list every",
    ),
    (
        listing(at("http://A"), at("http://a:80")),
        f"{LISTED}: http://a:80 is listed twice, as http:",
    ),
    (
        listing(SERVER | {"group_port": 51216}, at("http://b:8000") | {"group_port": 51216}),
        f"{LISTED}: group_port 51216 is listed twice; give every server its own",
    ),
    (listing({"group_port": 51216}), f"{LISTED}[0].base_url: is required, and missing; "),
    (listing({"base_url": "http://a:1"}), f"{LISTED}[0].group_port: is required, and missing; "),
    (listing(SERVER | {"unknown_flag": True}), f"{LISTED}[0].unknown_flag: is not a known key; "),
    *(
        (listing(at(url)), f"{LISTED}[0].base_url: must {wrong}")
        for url, wrong in (
            ("127.0.0.1:8000", "be an http(s) URL"),
            ("http://127.0.0.1:99999", "be an http(s) URL, got 'http://127.0.0.1:99999': Port out"),
            ("http://127.0.0.1:abc", "be an http(s) URL, got 'http://127.0.0.1:abc': Port could"),
            ("http://127.0.0.1:0", "name a port that can ... write it as http://127.0.0.1:8000"),
            ("http://[::1", "be an http(s) URL, got 'http://[::1': Invalid IPv6 URL; write it as "),
            ("http://a..b:8000", "be an http(s) URL, got 'http://a..b:8000': "),
            ("http://a b:8000", "be an http(s) URL without query, got 'http://a b:8000'; write"),
            ("http://user:secret@a:99999", "hold no user and password, which no server is sent; "),
        )
    ),
    # Decoding.
    ({GUARD: {"ngram_repeats": 1}}, f"{GUARD}.ngram_repeats: must be at least 2, got 1; "),
    ({DECODE_MODE: "sample"}, f"{DECODE_MODE}: 'sample' contradicts decoding.temperature 0"),
    (
        {DECODE_MODE: "greedy", TEMPERATURE: 0.7},
        f"{DECODE_MODE}: 'greedy' contradicts decoding.temperature 0.7, which is sampling; set ",
    ),
    # Batches and buffers.
    (
        {"training.gradient_accumulation_steps": 8},
        (
            "training.gradient_accumulation_steps: 8 contradicts effective_batch_size 32, which takes"
            " 32 with 1 per device and 1 learner ranks; remove one"
        ),
    ),
    (
        {BUFFER: 31},
        (
            f"{BUFFER}: 31 segments cannot hold a whole step (32 samples on channel A, 32 raw rollouts"
            " on channel B); raise it to at least 32"
        ),
    ),
    (
        {BUFFER: 40, "stage2_ab.channel_b.rollouts_per_step": 48},
        (
            f"{BUFFER}: 40 segments cannot hold a whole step (32 samples on channel A, 48 raw rollouts"
            " on channel B); raise it to at least 48"
        ),
    ),
    (
        {BUFFER: 15, "learner.world_size": 2},
        (
            f"{BUFFER}: 15 segments cannot hold a rank's share of a step, of 2 ranks (16 samples on"
            " channel A, 16 raw rollouts on channel B)"
        ),
    ),
    (
        {"training.effective_batch_size": 300, "training.per_device_train_batch_size": 8},
        f"{BUFFER}: 256 segments cannot hold a whole step (304 samples on channel A, ",
    ),
    # The queue.
    ({STALENESS: 2}, f"{STALENESS}: must be at most 1, got 2; "),
    ({**NO_QUEUE, STALENESS: 1}, f"{STALENESS}: 1 lets the queue ... or max_staleness: 0"),
    (
        {**STAGE1, STALENESS: 1},
        f"{STALENESS}: 1 has no effect: no two channel-B steps are in a row",
    ),
    ({"stage2_ab.schedule.b_ratio": 0.5, STALENESS: 1}, f"{STALENESS}: 1 has no effect: no two"),
    # What is learned, and by which parts.
    (
        {f"{OBJECTIVE}[0].channels": ["A"], f"{OBJECTIVE}[1].channels": ["A"]},
        f"{NO_TEACHER} channel B; add B to the channels",
    ),
    (
        {f"{OBJECTIVE}[0].channels": ["B"], f"{OBJECTIVE}[1].weight": 0.0},
        f"{NO_TEACHER} channel A; add A to the channels",
    ),
    *(
        (
            {f"{OBJECTIVE}[2]": TOKEN_CE | {"channels": channels}},
            (
                f"{OBJECTIVE}[2].name: 'token_ce' is active on channel {twice} already, by"
                f" {OBJECTIVE}[0]; remove or disable one of the two"
            ),
        )
        for channels, twice in ((["A"], "A"), (["B"], "B"), (["B", "A"], "B and A"))
    ),
    (
        {DIAGNOSTICS: [COORD_DIAG | {"channels": ["A", "B"]}, COORD_DIAG]},
        f"{DIAGNOSTICS}[1].name: 'coord_diag' is active on channel B already, by {DIAGNOSTICS}[0];",
    ),
    (FROZEN, f"{PARTS}: all of them are frozen: nothing is left to train; unfreeze one"),
    (
        {f"{PARTS}.aligner": {"frozen": True, "learning_rate": 1e-5}},
        f"{PARTS}.aligner.learning_rate: 1e-05, and the part is frozen; remove one of the two keys",
    ),
    (
        {f"{PARTS}.language_model.frozen": True, **LORA},
        f"{PARTS}.language_model.frozen: true, and model.adapter ... remove model.adapter",
    ),
    (
        {f"{PARTS}.aligner": {"frozen": True, "adapted": True}, **LORA},
        f"{PARTS}.aligner.frozen: true, and model.adapter is put into the part; unfreeze it, or set",
    ),
    (
        {f"{PARTS}.vision_tower.adapted": True},
        f"{PARTS}.vision_tower.adapted: true, and the run trains no adapter; set model.adapter, or",
    ),
    (
        {f"{PARTS}.language_model.adapted": False, **LORA},
        f"{PARTS}.language_model.adapted: false, and no other part is adapted: nothing is left to",
    ),
    (
        {"model.adapter": {"kind": "dora", "quantize": "nf4"}},
        "model.adapter.quantize: 'nf4' is of LoRA alone, and model.adapter.kind is dora; set kind:",
    ),
    (
        {**QLORA, "learner.world_size": 2, "learner.parallel": "fsdp"},
        "model.adapter.quantize: 'nf4', and weights in 4 bits are not sharded (learner.parallel: fsdp)",
    ),
    (
        {**QLORA, **COLOCATE, f"{MATCHING}.offload.enabled": True},
        f"{MATCHING}.offload: moves the model away, and ... or remove model.adapter.quantize",
    ),
    (
        {**QLORA, f"{VLLM}.enable_lora": True, SYNC: "adapter"},
        f"{SYNC}: 'adapter' cannot carry the weights in 4 bits ... {SYNC}: full or auto",
    ),
    (
        {f"{PARTS}.vision_tower.adapted": True, **SERVED_LORA, SYNC: "adapter"},
        f"{SYNC}: 'adapter' cannot carry what training.parts adapts ... {SYNC}: full or auto",
    ),
]

ACCEPTED = [
    {"learner.world_size": 2, "learner.parallel": "fsdp"},
    {STALENESS: 1},
    {STALENESS: 1, "stage2_ab.schedule.b_ratio": 0.51},
    {**COLOCATE, **listing(SERVER)},
    HF,
    {**NO_QUEUE, f"{VLLM}.mode": ...},
    {**COLOCATE, **STAGE1, f"{VLLM}.tensor_parallel_size": 2},
    {**SERVERS, **listing(SERVER, at("https://b.example/rollouts"))},
    {**SERVERS, f"{VLLM}.server.infer_timeout_s": None},
    {**SERVERS, **listing(at("http://[fe80::1%25eth0]:8000/a_b/"))},
    {**SERVERS, f"{VLLM}.server.kind": "vllm", f"{VLLM}.server.timeout_s": 10},
    {**SERVERS, f"{VLLM}.server.infer_timeout_s": -1},
    {SYNC: "auto"},
    {"checkpoint.keep_best": 2},
    {**HF, SYNC: "auto", **LORA},
    {**LORA, "learner.world_size": 2},
    {**SERVED_LORA, SYNC: "adapter"},
    {f"{PARTS}.vision_tower.adapted": True, **LORA},
    {**QLORA, "learner.world_size": 2},
    {
        **QLORA,
        **COLOCATE,
        f"{MATCHING}.offload": {"enabled": True, "offload_optimizer": True},
    },
    {
        f"{PARTS}.vision_tower.adapted": True,
        f"{PARTS}.language_model": {"frozen": True, "adapted": False},
        **LORA,
    },
    {
        "model.adapter": {"kind": "dora"},
        f"{VLLM}.enable_lora": True,
        SYNC: "auto",
        "learner.world_size": 2,
    },
    {GUARD: {"enabled": True, "max_object_keys": 100}},
    {f"{MATCHING}.offload": {"enabled": True, "offload_model": True}},
    {**COLOCATE, f"{MATCHING}.offload.enabled": True},
    {"data.val": ...},
    {"training.eval_steps": 1000},
    {DECODE_MODE: "greedy"},
    {DECODE_MODE: "sample", TEMPERATURE: 1.0},
    {f"{VLLM}.max_model_len": 2048},
    {"training.gradient_accumulation_steps": 32},
    {
        "training.effective_batch_size": 33,
        "training.per_device_train_batch_size": 8,
        "training.gradient_accumulation_steps": 5,
    },
    {BUFFER: 7, "training.packing": False},
    {BUFFER: 32},
    {BUFFER: 16, "learner.world_size": 2},
    {BUFFER: 32, "training.packing_window": 64},
    {**STAGE1, BUFFER: 32, "stage2_ab.channel_b.rollouts_per_step": 48},
    *({TEMPERATURE: temperature} for temperature in (0, 0.001, 0.01, 2, 2.0)),
    {**HF, TEMPERATURE: 5.0},
    {TEMPERATURE: 0.7, f"{MATCHING}.decoding.top_k": 0},
    {TEMPERATURE: 0.7, f"{MATCHING}.repetition_penalty": 1.1},
    {
        "learner.gpus": 1,
        ACTORS: {"gpus_per_actor": 2.0, "tensor_parallel_size": 2, "num_actors": 3},
    },
    {"learner.cpus": 0.5, f"{ACTORS}.cpus_per_actor": 0.5},
    {"learner.gpus": 0.0, f"{ACTORS}.gpus_per_actor": 0},
    {f"{OBJECTIVE}[0].channels": ["A"], f"{OBJECTIVE}[2]": TOKEN_CE | {"channels": ["B"]}},
    {f"{OBJECTIVE}[2]": TOKEN_CE | {"channels": ["A", "B"], "enabled": False}},
    {DIAGNOSTICS: [COORD_DIAG | {"channels": ["A"]}, COORD_DIAG, COORD_DIAG | {"enabled": False}]},
    {
        f"{OBJECTIVE}[2]": EXAMPLE_POLICY_GRADIENT | {"enabled": False},
        TEMPERATURE: 0.7,
        f"{MATCHING}.decoding.top_p": 0.9,
        f"{MATCHING}.decoding.top_k": 50,
    },
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
    {f"{PARTS}.vision_tower.frozen": True, f"{PARTS}.aligner.learning_rate": 1e-5},
]


@pytest.mark.parametrize(("changes", "expected"), REFUSED)
def test_contradictions_and_what_a_part_cannot_do_are_refused(changes, expected):
    (line,) = problems(changes)
    assert fits(line, expected), line
    assert "; " in line


@pytest.mark.parametrize("changes", ACCEPTED)
def test_values_that_agree_are_accepted(changes):
    assert problems(changes) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({BEAMS: 4}, [f"{BEAMS}: 4 beams need decode_mode: beam; "]),
        (
            BEAM,
            [
                (
                    f"{DECODE_MODE}: vllm.mode actors has no beam search; set"
                    f" {MATCHING}.rollout_backend: hf or {VLLM}.mode: colocate"
                )
            ],
        ),
        (
            {DECODE_MODE: "beam", TEMPERATURE: 1.0},
            [f"{DECODE_MODE}: 'beam' contradicts", f"{DECODE_MODE}: vllm.mode", f"{BEAMS}: 1 beam"],
        ),
        # transformers search no more beams than one device decodes sequences.
        ({**HF, **BEAM, f"{MATCHING}.decode_batch_size": 4}, []),
        (
            {**HF, **BEAM, f"{MATCHING}.decode_batch_size": 3},
            [
                (
                    f"{BEAMS}: 4 beams of one rollout are more than the 3 sequences that 'hf' decodes at"
                    f" a time ... set {MATCHING}.decode_batch_size to at least 4, or lower num_beams"
                )
            ],
        ),
        ({**HF, **BEAM, BEAMS: 11, f"{MATCHING}.decode_batch_size": 11}, []),
        ({**HF, **BEAM, f"{MATCHING}.length_penalty": 0.5, f"{MATCHING}.decode_batch_size": 4}, []),
        (
            {f"{MATCHING}.length_penalty": 0.5},
            [
                f"{MATCHING}.length_penalty: 0.5 is of beams, and there are none; set ... length_penalty"
            ],
        ),
        # vLLM gives log-probabilities for ten, whatever is decoded at a time: its beams are
        # requests of their own, of which its scheduler keeps to the bound.
        ({**COLOCATE, **BEAM, BEAMS: 10, f"{MATCHING}.decode_batch_size": 4}, []),
        (
            {**COLOCATE, **BEAM, BEAMS: 11},
            [
                (
                    f"{BEAMS}: 11 is more than the 10 beams of vLLM's search; lower it, or set"
                    f" {MATCHING}.rollout_backend: hf"
                )
            ],
        ),
        # Only transformers' beams are guarded.
        ({**HF, **BEAM, f"{GUARD}.enabled": True}, []),
        (
            {**COLOCATE, **BEAM, f"{GUARD}.enabled": True},
            [f"{GUARD}.enabled: true, and vLLM's beam search"],
        ),
    ],
)
def test_beam_search_is_refused_where_there_is_none_and_beyond_each_backends_bound(
    changes, expected
):
    lines = problems(changes)
    assert len(lines) == len(expected)
    assert all(map(fits, lines, expected)), lines


def test_every_further_entry_of_a_module_is_reported_once():
    lines = problems({f"{OBJECTIVE}[2]": TOKEN_CE, f"{OBJECTIVE}[3]": TOKEN_CE})
    assert [line.split(": ")[0] for line in lines] == [
        f"{OBJECTIVE}[2].name",
        f"{OBJECTIVE}[3].name",
    ]


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({f"{VLLM}.mode": "colocate"}, "vllm.mode colocate"),
        ({f"{MATCHING}.rollout_backend": "hf"}, "rollout_backend hf"),
    ],
)
def test_the_in_step_queue_needs_dedicated_devices(changes, where):
    (line,) = problems(changes)
    assert line.startswith("stage2_ab.channel_b.enable_pipeline: ")
    assert f"dedicated devices, which {where} does not have; set " in line
    assert f"{VLLM}.mode: server or actors" in line
