//! The command line as clap sees it.

use crate::units;
use clap::{Args, Parser, Subcommand};
use glinthawk_model::catalogue::DEFAULT_MODEL;
use std::path::PathBuf;

/// Offline language-model inference: a pile of prompts in, completions out.
#[derive(Parser)]
#[command(name = "glinthawk", version, propagate_version = true, max_term_width = 100)]
pub struct Cli {
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Subcommand)]
pub enum Command {
    /// Run a file of requests through a model; the same command resumes an interrupted job
    #[command(after_help = RUN_HELP)]
    Run(RunArgs),
    /// Complete one prompt and stream the answer to the terminal
    Generate(GenerateArgs),
    /// Fetch a model into the cache
    Pull {
        /// A name of the catalogue, or org/name of the Hugging Face hub
        #[arg(default_value = DEFAULT_MODEL)]
        model: String,
    },
    /// List the catalogue and what is in the cache
    Models,
    /// Measure this machine end to end: tokens per second on a fixed job
    Bench(BenchArgs),
}

const RUN_HELP: &str = "\
Input lines are OpenAI batch requests (custom_id, method, url, body) or bare bodies with \"prompt\" \
or \"messages\". One output line follows for each, as it completes, in the OpenAI batch output \
format. A bad line gets an error line and the job goes on.

Exit code: 0 all lines have a result, 1 the job failed, 2 bad usage, 3 finished, some lines failed.";

/// Options of `run`.
#[derive(Args)]
pub struct RunArgs {
    /// Requests, one JSON object a line; `-` reads standard input
    pub input: PathBuf,
    /// Where results go; `-` writes standard output [default: INPUT with .out.jsonl for its ending]
    #[arg(short, long)]
    pub output: Option<PathBuf>,
    /// Start anew instead of continuing what the output file holds
    #[arg(long)]
    pub overwrite: bool,
    /// Write statistics of the run to this file, as JSON
    #[arg(long, value_name = "FILE.json")]
    pub stats: Option<PathBuf>,
    /// The engine's options
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Options that choose and size the engine.
#[derive(Args)]
pub struct EngineArgs {
    /// A name of the catalogue, a folder or .gguf file, org/name of the Hugging Face hub, or dummy:SHAPE
    #[arg(long, short, default_value = DEFAULT_MODEL)]
    pub model: String,
    /// Rows in a batch: one for each prompt that generates, the rest for prefill
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub batch: u32,
    /// Batches in flight at once
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub flights: u32,
    /// Prefill rows of one prompt in a batch, at most
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub chunk: u32,
    /// Memory for contexts, such as 4GiB [default: half of what is free]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes)]
    pub context_memory: Option<u64>,
    /// Longest context in tokens, prompt and completion together [default: the model's]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..))]
    pub max_context: Option<u32>,
    /// Kernel threads [default: the cores this process may use]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Instruction set of the kernels: portable, avx2, avx512, avx512bf16 or amx [default: the best here]
    #[arg(long, env = "GLINTHAWK_ISA")]
    pub isa: Option<String>,
}

/// Options of `generate`.
#[derive(Args)]
pub struct GenerateArgs {
    /// The prompt
    pub text: String,
    /// Continue the text as it stands instead of answering it as a chat message
    #[arg(long)]
    pub raw: bool,
    /// Generated tokens at most
    #[arg(long, default_value_t = 512)]
    pub max_tokens: u32,
    /// 0 picks the likeliest token every time
    #[arg(long, default_value_t = 0.0)]
    pub temperature: f32,
    /// Seed of the sampling
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// The engine's options
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Options of `bench`.
#[derive(Args)]
pub struct BenchArgs {
    /// Prompts
    #[arg(long, default_value_t = 256)]
    pub prompts: u32,
    /// Tokens of each prompt
    #[arg(long, default_value_t = 128)]
    pub input: u32,
    /// Tokens generated for each prompt
    #[arg(long, default_value_t = 128)]
    pub output: u32,
    /// Runs; the median counts
    #[arg(long, default_value_t = 3)]
    pub runs: u32,
    /// The engine's options
    #[command(flatten)]
    pub engine: EngineArgs,
}
