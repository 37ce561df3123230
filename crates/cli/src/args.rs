//! The command line as clap sees it.

use crate::units;
use clap::{Args, Parser, Subcommand};
use glinthawk_compute::{ContextType, Isa};
use glinthawk_launch::{
    BATCH_DEFAULT, CHUNK_DEFAULT, Device, Specification, Topology, flights_default,
};
use glinthawk_model::catalogue::DEFAULT_MODEL;
use glinthawk_plan::Objective;
use std::path::PathBuf;
use std::time::Duration;

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
    /// Show what the model sees of a prompt: its text, token ids and pieces; loads no weights
    Tokenize(TokenizeArgs),
    /// Fetch a model into the cache
    Pull {
        /// A name in the catalogue, or org/name on the Hugging Face hub
        #[arg(default_value = DEFAULT_MODEL)]
        model: String,
    },
    /// List the catalogue and what is in the cache
    Models,
    /// List the CPUs and GPUs here, and what is missing to use them
    Devices,
    /// Join a dispatcher as a worker
    Worker(WorkerArgs),
    /// Choose the best cluster for a model and a workload, by simulation
    Plan(PlanArgs),
    /// Time the kernels and the engine on this machine, for a model's shape
    Profile(ProfileArgs),
    /// Simulate one configuration in detail
    Simulate(SimulateArgs),
    /// Regenerate the paper's tables and figures, next to the originals
    Reproduce {
        /// Folder for the page and its plots
        #[arg(short, long, default_value = "docs")]
        output: PathBuf,
    },
    /// Measure this machine: the engine end to end, or its kernels, network or planner alone
    #[command(args_conflicts_with_subcommands = true)]
    Bench {
        /// What to measure; end to end by default
        #[command(subcommand)]
        part: Option<BenchPart>,
        /// Options of the end-to-end measurement
        #[command(flatten)]
        args: BenchArgs,
    },
}

const RUN_HELP: &str = "\
Input lines are OpenAI batch requests (custom_id, method, url, body) or bare bodies with \"prompt\" \
or \"messages\". Each gets one output line in the OpenAI batch output format, as soon as it \
completes. A bad line gets an error line and the job goes on.

Exit code: 0 every line has an answer, 1 the job failed, 2 bad usage, 3 finished, but some lines failed.";

/// Options of `run`.
#[derive(Args)]
pub struct RunArgs {
    /// Requests, one JSON object per line; `-` reads standard input
    pub input: PathBuf,
    /// Where results go; `-` writes standard output [default: big.out.jsonl for big.jsonl,
    /// standard output for a stream]
    #[arg(short, long)]
    pub output: Option<PathBuf>,
    /// Leave results in the output file that match no line of INPUT, instead of refusing to run
    #[arg(long, conflicts_with = "overwrite")]
    pub keep: bool,
    /// Remove all results that the output file holds and start again
    #[arg(long)]
    pub overwrite: bool,
    /// Write statistics of the run to this file, as JSON
    #[arg(long, value_name = "FILE.json")]
    pub stats: Option<PathBuf>,
    /// Take model, topology, batch, flights, chunk and context sizes from a plan written by `plan`
    #[arg(long, value_name = "FILE.toml", conflicts_with_all = [
        "model", "batch", "flights", "chunk", "context_memory", "max_context", "pipelines", "tier1", "tier2", "hybrid",
    ])]
    pub plan: Option<PathBuf>,
    /// The engine's options
    #[command(flatten)]
    pub engine: EngineArgs,
    /// The cluster's options
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// Options that spread the engine over processes and machines.
#[derive(Args)]
#[command(next_help_heading = "Two tiers")]
pub struct ClusterArgs {
    /// Pipelines: so many times the nodes of --tier1 and --tier2, each with the whole model, share the prompts
    #[arg(long, value_name = "P", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub pipelines: Option<u32>,
    /// Tier-1 nodes: processes that each hold a slice of the weights
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub tier1: Option<u32>,
    /// Tier-2 nodes for each Tier-1 node: processes that hold contexts and attend; 0 is single-tier
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1024))]
    pub tier2: Option<u32>,
    /// Let Tier-1 nodes hold contexts and attend too, beside their Tier-2 nodes
    #[arg(long)]
    pub hybrid: bool,
    /// Cores of each local Tier-1 process and of each Tier-2 process, such as 12,4 [default: all of them share all cores if
    /// they can take turns, else by what each has to do]
    #[arg(long, value_name = "N,N", value_parser = units::parse_cores)]
    pub cores: Option<(u32, u32)>,
    /// Artificial delay of every message between the tiers, each way, such as 20ms
    #[arg(long, value_name = "TIME", value_parser = units::parse_duration)]
    pub delay: Option<Duration>,
    /// Artificial bandwidth of every link between the tiers, each way, such as 1gbit
    #[arg(long, value_name = "RATE", value_parser = units::parse_rate)]
    pub bandwidth: Option<u64>,
    /// Wait at this address for workers from elsewhere instead of starting local ones
    #[arg(long, value_name = "ADDR", value_parser = units::parse_address)]
    pub listen: Option<String>,
    /// Number of workers to wait for; --tier1 and --tier2 say what they become. Without it, as many as those need, or one
    #[arg(long, value_name = "N", requires = "listen", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub workers: Option<u32>,
    /// Number of further workers to wait for: each takes the place of a worker that is lost
    #[arg(long, value_name = "N", requires = "listen", default_value_t = 0, hide_default_value = true, value_parser = clap::value_parser!(u32).range(0..=4096))]
    pub spares: u32,
    /// How long to wait for another worker in the place of a lost Tier-1 node, such as 5s, before its prompts are
    /// computed elsewhere or the job stops [default: 60s]
    #[arg(long, value_name = "TIME", value_parser = units::parse_duration)]
    pub replace_within: Option<Duration>,
    #[command(flatten)]
    pub security: SecurityArgs,
    /// What Tier 1 computes: what is `ready`, whole flights first, or only whole `flights` (to see
    /// what stragglers cost)
    #[arg(long, value_enum, default_value_t = MergeArg::Ready, hide_possible_values = true)]
    pub merge: MergeArg,
    /// Compute every prompt from its beginning, even if others begin with the same tokens (for
    /// comparison)
    #[arg(long)]
    pub no_prefix_sharing: bool,
    /// Compute no token before it is known to come next (for comparison)
    #[arg(long)]
    pub no_drafts: bool,
    /// Write every node's timeline to this file, for Perfetto or chrome://tracing
    #[arg(long, value_name = "FILE.json")]
    pub trace: Option<PathBuf>,
}

/// Options that keep strangers out.
#[derive(Args, Clone)]
pub struct SecurityArgs {
    /// File that holds the cluster's secret [default: the environment variable GLINTHAWK_TOKEN holds it]
    #[arg(long, value_name = "FILE")]
    pub secret_file: Option<PathBuf>,
    /// Do not encrypt connections to other machines: anyone between them can read and join. Must be given to the
    /// dispatcher and to every worker
    #[arg(long)]
    pub insecure: bool,
}

/// When Tier 1 computes.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum MergeArg {
    /// Whatever shards are ready
    Ready,
    /// Only whole flights
    Flights,
}

/// Options of `plan`.
#[derive(Args)]
pub struct PlanArgs {
    /// The available machines, in TOML; see crates/plan/data/clusters for examples
    #[arg(long, value_name = "FILE.toml")]
    pub cluster: PathBuf,
    /// The model's shape: dummy:SHAPE, or a model on this machine
    #[arg(long, short)]
    pub model: String,
    /// Lengths of the job's prompts and completions: a CSV of prompt_tokens,output_tokens, or a file
    /// of requests (.jsonl)
    #[arg(long, value_name = "FILE")]
    pub workload: PathBuf,
    /// What to optimise: throughput (least time for the job; the default), cost (least cost for the job), or deadline
    /// (cheapest that finishes the job within --hours; the default with --hours)
    #[arg(long, value_enum)]
    pub objective: Option<ObjectiveArg>,
    /// Time limit of the job in hours: plan for a deadline
    #[arg(long, required_if_eq("objective", "deadline"), allow_negative_numbers = true, value_parser = units::parse_hours)]
    pub hours: Option<f64>,
    /// Most prefill rows of one prompt in a batch
    #[arg(long, default_value_t = CHUNK_DEFAULT, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub chunk: u32,
    /// Most rows in a Tier-1 batch
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub batch_max: u32,
    /// Write the plan to this file
    #[arg(short, long, value_name = "FILE.toml")]
    pub output: Option<PathBuf>,
}

/// What a plan optimises.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ObjectiveArg {
    /// Least time for the job
    Throughput,
    /// Least cost for the job
    Cost,
    /// Cheapest that finishes in time
    Deadline,
}

/// Options that contradict each other: exit code 2, before anything is opened.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Usage(&'static str);

impl PlanArgs {
    /// What to optimise; hours alone are a deadline.
    pub fn objective(&self) -> Result<Objective, Usage> {
        match (self.objective, self.hours) {
            (None | Some(ObjectiveArg::Deadline), Some(hours)) => {
                Ok(Objective::Deadline { seconds: hours * 3600.0 })
            }
            (Some(ObjectiveArg::Deadline), None) => {
                Err(Usage("--objective deadline needs --hours"))
            }
            (Some(_), Some(_)) => Err(Usage(
                "--hours is a deadline: leave out --objective, or give --objective deadline",
            )),
            (None | Some(ObjectiveArg::Throughput), None) => Ok(Objective::Throughput),
            (Some(ObjectiveArg::Cost), None) => Ok(Objective::Cost),
        }
    }
}

/// Options of `simulate`.
#[derive(Args)]
#[command(
    after_help = "Prints the settled state, with every flight full. With --workload or --prompts, also prints \
                  what such a job takes from beginning to end, by running the dispatcher itself in virtual \
                  time. The timeline then shows the job. With --plan and --cluster, prints the job as `plan` \
                  forecasts it."
)]
pub struct SimulateArgs {
    /// The model's shape: dummy:SHAPE, or a model on this machine
    #[arg(long, short, default_value = DEFAULT_MODEL)]
    pub model: String,
    /// Simulate the job on this plan, which `plan` wrote; needs the plan's cluster and a job
    #[arg(long, value_name = "FILE.toml", requires = "cluster", conflicts_with_all = ["model", "profile", "device", "tier2_profile", "tier2_device", "tier1", "tier2", "hybrid", "lanes", "batch", "flights", "chunk", "delay", "bandwidth", "context", "context_memory", "max_context", "cores", "sampled"])]
    pub plan: Option<PathBuf>,
    /// The plan's cluster
    #[arg(long, value_name = "FILE.toml", requires = "plan")]
    pub cluster: Option<PathBuf>,
    /// Kernel times: a file written by `profile`
    #[arg(long, value_name = "FILE.json")]
    pub profile: Option<PathBuf>,
    /// Kernel times: a device in the catalogue, such as t4
    #[arg(long, value_name = "NAME", conflicts_with = "profile")]
    pub device: Option<String>,
    /// Kernel times of Tier 2, if they differ
    #[arg(long, value_name = "FILE.json")]
    pub tier2_profile: Option<PathBuf>,
    /// Kernel times of Tier 2, if they differ
    #[arg(long, value_name = "NAME", conflicts_with = "tier2_profile")]
    pub tier2_device: Option<String>,
    /// Tier-1 nodes
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub tier1: u32,
    /// Tier-2 nodes for each Tier-1 node; 0 is single-tier
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=4096))]
    pub tier2: u32,
    /// Let Tier-1 nodes hold contexts and attend too
    #[arg(long)]
    pub hybrid: bool,
    /// Lanes that compute side by side in each process, each with as many threads as the profile
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096), conflicts_with = "cores")]
    pub lanes: u32,
    /// Rows of a flight for each attention worker [default: 256; 1024 for a GPU's own in a hybrid with CPUs]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub batch: Option<u32>,
    /// Flights in the air [default: 1 for one node, else 3 for each Tier-1 node]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub flights: Option<u32>,
    /// Most prefill rows of one prompt in a batch
    #[arg(long, default_value_t = CHUNK_DEFAULT, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub chunk: u32,
    /// Delay of every message between the tiers, each way, such as 20ms
    #[arg(long, value_name = "TIME", value_parser = units::parse_duration)]
    pub delay: Option<Duration>,
    /// Bandwidth of every link between the tiers, each way, such as 1gbit
    #[arg(long, value_name = "RATE", value_parser = units::parse_rate)]
    pub bandwidth: Option<u64>,
    /// Positions that every row attends to, if there is no workload
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    pub context: u32,
    /// The job: a CSV of prompt_tokens,output_tokens, or a file of requests (.jsonl)
    #[arg(long, value_name = "FILE")]
    pub workload: Option<PathBuf>,
    /// The job: a number of equal prompts, such as 1000x128+256 (128 tokens in, 256 out)
    #[arg(long, value_name = "JOB", conflicts_with = "workload")]
    pub prompts: Option<String>,
    /// Memory for contexts of each process that attends; in a hybrid, two sizes are for its Tier-1 and its Tier-2 nodes
    /// [default: what a --device has beside its weights; with a --profile enough]
    #[arg(long, value_name = "SIZE[,SIZE]", value_delimiter = ',', num_args = 1..=2, value_parser = units::parse_bytes)]
    pub context_memory: Vec<u64>,

    /// Longest context in tokens [default: the model's]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..))]
    pub max_context: Option<u32>,
    /// Nodes are processes that share this many cores, as `run` starts them [default: each has its own
    /// machine]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub cores: Option<u32>,
    /// Tokens are sampled instead of greedy
    #[arg(long)]
    pub sampled: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Write the timeline to this file, for Perfetto or chrome://tracing
    #[arg(long, value_name = "FILE.json")]
    pub trace: Option<PathBuf>,
}

impl SimulateArgs {
    /// Rows of a flight for each attention worker.
    pub fn batch(&self) -> u32 {
        self.batch.unwrap_or(BATCH_DEFAULT)
    }

    /// Flights in the air; the default is the same as for `run`.
    pub fn flights(&self) -> u32 {
        self.flights.unwrap_or(flights_default(self.tier1, self.tier2))
    }
}

/// Options of `worker`.
#[derive(Args)]
#[command(
    after_help = "The cluster's secret is the same on the dispatcher and on every worker: in a file \
                  (--secret-file) or in the environment variable GLINTHAWK_TOKEN. Connections to other \
                  machines are encrypted, and open to those that have it. Without --stay, a worker looks for its dispatcher for \
                  a minute and ends with the job. With --stay, only Ctrl-C or a signal ends it."
)]
pub struct WorkerArgs {
    /// The dispatcher's address, such as 10.0.0.1:7070
    #[arg(long, value_name = "ADDR", value_parser = units::parse_address)]
    pub join: String,
    #[command(flatten)]
    pub security: SecurityArgs,
    /// After a job, wait for the next one; wait for a dispatcher as long as it takes
    #[arg(long)]
    pub stay: bool,
    /// Tier to join: 1 or 2 [default: the dispatcher decides]
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=2))]
    pub tier: Option<u8>,
    /// Place among the workers of the tier
    #[arg(long, hide = true)]
    pub place: Option<u32>,
    /// Cores to run on, such as 0,1
    #[arg(long, value_delimiter = ',')]
    pub cores: Vec<usize>,
    /// Memory for contexts, such as 4GiB [default: half of the free memory; on a GPU, what weights leave]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes)]
    pub context_memory: Option<u64>,
    /// What it computes on: cpu, cuda:N, or auto: the first GPU, or the CPU if there is none
    #[arg(long, default_value_t, value_name = "DEVICE")]
    pub device: Device,
    /// Kernel threads [default: one per available core]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Best instruction set to offer [default: the machine's best]
    #[arg(long, env = "GLINTHAWK_ISA")]
    pub isa: Option<Isa>,
}

/// Options of `profile`.
#[derive(Args)]
pub struct ProfileArgs {
    /// The model whose shape to time: a name in the catalogue, a folder or .gguf file, org/name on the Hugging Face
    /// hub, or dummy:SHAPE
    #[arg(long, short, default_value = DEFAULT_MODEL)]
    pub model: String,
    /// Take under a minute: fewer repetitions, batches up to 1024 instead of 4096
    #[arg(long)]
    pub quick: bool,
    /// Take a few seconds: every second batch, up to 512
    #[arg(long, conflicts_with = "quick")]
    pub brief: bool,
    /// Write the profile to this file [default: in the cache, where `run` finds it]
    #[arg(short, long, value_name = "FILE.json")]
    pub output: Option<PathBuf>,
    /// What to time: cpu, cuda:N, or auto: the first GPU, or the CPU if there is none
    #[arg(long, default_value_t, value_name = "DEVICE")]
    pub device: Device,
    /// Threads of each kernel on a CPU. With 1, one kernel runs on every core at once, as lanes and local nodes do; for a
    /// node that has the machine to itself, give its number of cores
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: u32,
    /// Instruction set of the kernels [default: the machine's best]
    #[arg(long, env = "GLINTHAWK_ISA")]
    pub isa: Option<Isa>,
}

/// Options that choose and size the engine.
#[derive(Args)]
#[command(next_help_heading = "Model and engine")]
pub struct EngineArgs {
    /// A name in the catalogue, a folder or .gguf file, org/name on the Hugging Face hub, or dummy:SHAPE
    #[arg(long, short, default_value = DEFAULT_MODEL)]
    pub model: String,
    /// Rows in a batch, for each attention worker or lane. A prompt that generates takes one row;
    /// prefill takes the rest [default: 256, 1024 in one process if the job is mostly prompt, or 4096 on a GPU; in one
    /// process, the best for the job if there is a profile of this machine]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub batch: Option<u32>,
    /// Most batches in flight at once. With few prompts there are fewer [default: 1, or 3 for each Tier-1 node of a
    /// cluster whose processes do not share all cores]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub flights: Option<u32>,
    /// Most prefill rows of one prompt in a batch [default: 256, or 1024 in one process if the job is mostly prompt; on one
    /// machine, the best for the job if there is a profile of it]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub chunk: Option<u32>,
    /// Memory for contexts in each process that attends, such as 4GiB; in a hybrid, two sizes are for its Tier-1 and its
    /// Tier-2 nodes, such as 2GiB,48GiB [default: half of the free memory, in equal parts; on a GPU, all that weights
    /// leave]
    #[arg(long, value_name = "SIZE[,SIZE]", value_delimiter = ',', value_parser = units::parse_bytes)]
    pub context_memory: Vec<u64>,
    /// How keys and values are stored: bf16, or int8, which is half as large and less exact
    #[arg(long, value_name = "TYPE", default_value_t)]
    pub context_type: ContextType,
    /// Longest context in tokens, prompt and completion together [default: the model's]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..))]
    pub max_context: Option<u32>,
    /// Kernel threads; with enough prompts, they form lanes that each run their own batches
    /// [default: one per available core]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Instruction set of the kernels: portable, avx2, avx512, avx512bf16 or amx [default: the machine's
    /// best]
    #[arg(long, env = "GLINTHAWK_ISA")]
    pub isa: Option<Isa>,
    /// Where the model runs: cpu, cuda:N, or auto: the first GPU, or the CPU if there is none. In one process, a GPU
    /// holds the whole model and all contexts. With --tier1 or --tier2, auto is the CPU, and cuda:N is for Tier 1: its
    /// nodes get GPU N and those that follow. A list gives each Tier-1 node, or each node, its own: cuda:0,cuda:0
    #[arg(long, default_value = "auto", value_name = "DEVICE", value_delimiter = ',')]
    pub device: Vec<Device>,
}

impl EngineArgs {
    /// The devices, if there is more than one.
    fn listed_devices(&self) -> Vec<Device> {
        if self.device.len() > 1 { self.device.clone() } else { Vec::new() }
    }

    /// Memory for contexts, if there is more than one size.
    fn listed_memory(&self) -> Vec<u64> {
        if self.context_memory.len() > 1 { self.context_memory.clone() } else { Vec::new() }
    }

    /// The options as a specification: an engine in this process.
    pub fn specification(&self) -> Specification {
        Specification {
            model: self.model.clone(),
            device: self.device[0],
            isa: self.isa,
            threads: self.threads,
            topology: Topology {
                devices: self.listed_devices(),
                context_memory: self.listed_memory(),
                ..Topology::default()
            },
            batch: self.batch,
            flights: self.flights,
            chunk: self.chunk,
            context_memory_bytes: self.context_memory.last().copied(),
            context_type: self.context_type,
            context_max: self.max_context,
            whole_flights: false,
            sharing: true,
            drafts: true,
            trace: false,
        }
    }
}

impl RunArgs {
    /// The options as a specification, without what a plan says.
    pub fn specification(&self) -> Specification {
        let cluster = &self.cluster;
        Specification {
            topology: Topology {
                pipelines: cluster.pipelines,
                tier1: cluster.tier1,
                tier2: cluster.tier2,
                hybrid: cluster.hybrid,
                listen: cluster.listen.clone(),
                workers: cluster.workers,
                spares: cluster.spares,
                replace_within: cluster.replace_within,
                secret_file: cluster.security.secret_file.clone(),
                insecure: cluster.security.insecure,
                devices: self.engine.listed_devices(),
                context_memory: self.engine.listed_memory(),
                cores: self.cluster.cores,
                delay: cluster.delay,
                bandwidth: cluster.bandwidth,
            },
            whole_flights: cluster.merge == MergeArg::Flights,
            sharing: !cluster.no_prefix_sharing,
            drafts: !cluster.no_drafts,
            trace: cluster.trace.is_some(),
            ..self.engine.specification()
        }
    }
}

/// Options of `generate`.
#[derive(Args)]
pub struct GenerateArgs {
    /// The prompt
    pub text: String,
    /// Continue the text as it stands instead of answering it as a chat message
    #[arg(long)]
    pub raw: bool,
    /// Most tokens to generate
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: u32,
    /// Sampling temperature; 0 always picks the likeliest token
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true, value_parser = units::parse_temperature)]
    pub temperature: f32,
    /// Seed for sampling
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// The engine's options
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Options of `tokenize`.
#[derive(Args)]
pub struct TokenizeArgs {
    /// The text: a chat message, as `generate` takes it
    #[arg(required_unless_present = "request")]
    pub text: Option<String>,
    /// Take the text as it stands, without the chat template
    #[arg(long, requires = "text")]
    pub raw: bool,
    /// Take a line of this file as `run` reads it; `-` is standard input
    #[arg(long, value_name = "FILE.jsonl", conflicts_with = "text")]
    pub request: Option<PathBuf>,
    /// Which line of the file
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "text", value_parser = clap::value_parser!(u64).range(1..))]
    pub line: u64,
    /// Print JSON: text, tokens (id, piece, special), count
    #[arg(long)]
    pub json: bool,
    /// A name in the catalogue, a folder or .gguf file, org/name on the Hugging Face hub, or dummy:SHAPE
    #[arg(long, short, default_value = DEFAULT_MODEL)]
    pub model: String,
    /// Longest context in tokens: a prompt that fills it is refused, as by `run` [default: the model's]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..))]
    pub max_context: Option<u32>,
}

/// A part to measure alone.
#[derive(Subcommand)]
pub enum BenchPart {
    /// Each kernel as a fraction of the machine's limits, measured in the same run
    Kernels(KernelBenchArgs),
    /// What the network code adds to bare TCP on the loopback
    Net {
        /// Rows of a shard
        #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=4096))]
        rows: u32,
        /// The shape that sets the width of messages, such as llama2-7b
        #[arg(long, default_value = "smollm2-135m")]
        shape: String,
    },
    /// The paper's search, the simulator's events per second, and a cluster of 21,000 nodes
    Planner,
}

/// Options of `bench kernels`.
#[derive(Args)]
pub struct KernelBenchArgs {
    /// Shapes to measure
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "smollm2-135m,llama2-7b,llama3-8b,llama2-70b"
    )]
    pub shapes: Vec<String>,
    /// Batches of the products, in rows
    #[arg(long, value_delimiter = ',', default_value = "1,4,16,64,256,512,1024")]
    pub batches: Vec<usize>,
    /// Contexts of the attention, in tokens
    #[arg(long, value_delimiter = ',', default_value = "128,512,2048,8192")]
    pub contexts: Vec<usize>,
    /// Chunks of the prefill attention, in rows: the last ones of a context
    #[arg(long, value_delimiter = ',', default_value = "64,256,1024")]
    pub chunks: Vec<usize>,
    /// Repetitions; the median is reported
    #[arg(long, default_value_t = 5)]
    pub runs: usize,
    /// Kernel threads [default: one per available core]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Instruction set [default: the machine's best]
    #[arg(long, env = "GLINTHAWK_ISA")]
    pub isa: Option<Isa>,
    /// What is measured: cpu, or cuda:N (a layer without attention, and its products)
    #[arg(long, default_value = "cpu")]
    pub device: Device,
}

/// Options of `bench`.
#[derive(Args)]
pub struct BenchArgs {
    /// Prompts
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub prompts: u32,
    /// Tokens of each prompt
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub input: u32,
    /// How many of them are the same for all prompts
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub prefix: u32,
    /// Tokens generated for each prompt
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub output: u32,
    /// Runs; the median is reported
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub runs: u32,
    /// Compute no token before it is known to come next. Prompts without meaning make a model repeat itself, which is
    /// easily guessed
    #[arg(long)]
    pub no_drafts: bool,
    /// The engine's options
    #[command(flatten)]
    pub engine: EngineArgs,
}
