"""The job on OpenVINO GenAI's continuous batching: run_openvino.py MODEL.gguf."""

import job
import numpy
import openvino
import openvino_genai

# OpenVINO chooses block sizes itself. This is memory for all contexts at once, with room to spare.
CACHE_GIB = 4

scheduler = openvino_genai.SchedulerConfig()
scheduler.max_num_seqs = job.PROMPTS
scheduler.max_num_batched_tokens = 2048
scheduler.enable_prefix_caching = job.PREFIX > 0
scheduler.cache_size = CACHE_GIB
pipeline = openvino_genai.ContinuousBatchingPipeline(
    job.MODEL,
    scheduler,
    "CPU",
    {
        "INFERENCE_PRECISION_HINT": "bf16" if job.HAS_BF16 else "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": job.THREADS,
    },
)


def generate(prompts, output):
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = output
    config.ignore_eos = True
    config.do_sample = False
    inputs = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
    results = pipeline.generate(inputs, [config] * len(prompts))
    return [result.m_generation_ids[0] for result in results]


job.measure(generate)
