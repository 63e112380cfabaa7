#!/usr/bin/env bash
# Train the demo target's heads on text of its own: about an hour and a half on two cores with bfloat16 instructions.
# The text is written first (half an hour) and kept in demo-heads.partial/; an interrupted run goes on where it was.
set -euo pipefail
cd "$(dirname "$0")/../.."
treeopt train --target demo --dtype bfloat16 \
    --prompts calibration/prompts/training.jsonl --prompts calibration/prompts/chat.jsonl \
    --num-layers 2 --epochs 2 --positions 512 --learning-rate 2e-3 -o demo-heads
mkdir -p calibration/heads/demo
cp demo-heads/config.json demo-heads/medusa_lm_head.safetensors calibration/heads/demo/
