#!/usr/bin/env bash
# A first day: a stock model, COCO files, the model's F1, ten training steps, F1 again, an environment. About three minutes on two CPU cores.
#
#   examples/first_day.sh [FOLDER]                                                   # everything small, made here; default FOLDER: outputs/first_day
#   MODEL=Qwen/Qwen3-VL-4B-Instruct COCO=/data/coco examples/first_day.sh [FOLDER]   # your model and data: COCO has annotations/, train2017/, val2017/
#
# Each run deletes FOLDER/day and makes it again. The environment in FOLDER is kept, so you can change it.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=("$root/.venv/bin/python")
if [[ -n ${PYTHON:-} ]]; then read -ra python <<<"$PYTHON"; fi
folder=${1:-outputs/first_day}
day=$folder/day
rm -rf "$day"

# 1. A model in its publisher's form, and images with boxes. Skipped if you give your own.
if [[ -z ${MODEL:-} ]]; then
    "${python[@]}" "$root/examples/make_stock.py" "$day/made"
    MODEL=$day/made/model COCO=$day/made/coco
    # Three million parameters on two cores: short answers, few images, everything in one process.
    experiment=(+experiment=stage2_colocate cluster=local model=demo training.learning_rate=1e-3 custom.object_field_order=desc_first
        rollout_matching.trim_trailing_false_positives=false)
    sizes=(global_max_length=512 rollout_matching.max_new_tokens=64 cluster.dashboard=false)
else
    # One large GPU, used in turns by the engine and by the learner, which trains an adapter. Not run on a GPU.
    experiment=(+experiment=stage2_3v1_4b backend=colocate model.adapter.kind=lora)
    sizes=(global_max_length=8192 data.max_val_samples=200)
fi

# 2. Records from COCO files, with a report of skipped objects and the reasons.
for part in train val; do
    "${python[@]}" -m launch.import_data format=coco annotations="$COCO/annotations/instances_${part}2017.json" images="$COCO/${part}2017" \
        out="$day/data/$part.jsonl"
done

# 3. The model's F1 before training. It answers in its own JSON format, without coordinate tokens.
"${python[@]}" -m launch.evaluate model="$MODEL" data="$day/data/val.jsonl" data.answer_format=qwen3_vl "${sizes[@]}" \
    telemetry.run_dir="$day" name=before

# 4. Ten steps in the same format: seven on the ground truth (channel A), three on the model's own rollouts (channel B).
"${python[@]}" -m launch.train "${experiment[@]}" "${sizes[@]}" objective=digits data.answer_format=qwen3_vl model.path="$MODEL" \
    data.train="$day/data/train.jsonl" data.val="$day/data/val.jsonl" telemetry.run_dir="$day/run" \
    training.max_steps=10 training.lr_warmup_steps=2 stage2_ab.schedule.warmup_steps=4 stage2_ab.schedule.b_ratio=0.5

# 5. The same report for the trained checkpoint.
"${python[@]}" -m launch.evaluate run="$day/run" name=after

# 6. A new environment, and ten policy-gradient steps in it with a small text model (for your model: model.path).
if [[ ! -e $folder/largest_digit.py ]]; then
    "${python[@]}" -m launch.new_environment largest_digit --out "$folder"
fi
"${python[@]}" -m launch.demo language-model --out "$day/made/lm"
"${python[@]}" -m launch.train --config-dir "$folder" +experiment=largest_digit backend=hf cluster=local model.path="$day/made/lm" \
    training.max_steps=10 training.lr_warmup_steps=2 training.effective_batch_size=128 environment.num_eval_examples=64 \
    telemetry.run_dir="$day/environment"

f1() { "${python[@]}" -c 'import json, sys; print(format(json.load(open(sys.argv[1]))["detection"][0]["f1"], ".3f"))' "$1/report.json"; }
echo "first day: F1@0.5 $(f1 "$day/evaluations/before") before, $(f1 "$day/run/evaluations/after") after ten steps; reports and runs in $day"
