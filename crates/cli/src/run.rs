//! `run`: the main job.

use crate::args::RunArgs;
use crate::folder::{file_uses, require_folder};
use crate::progress::{JobProgress, say, with_bars};
use crate::{EXIT_LINES_FAILED, interrupt, outlook, typed, units};
use anyhow::{Context, bail};
use glinthawk_cluster::{Crowd, NodeReport, RunStats, run_job, write_trace};
use glinthawk_compute::cuda::has_driver;
use glinthawk_jobs::{
    Earlier, FileUse, Input, Job, JobOptions, JobSummary, Next, Output, PreparedJob, ServedModel,
    Survey, refuse_collisions,
};
use glinthawk_launch::{
    Device, Expected, LINES_SURVEYED, Opened, Outlook, Planned, Resolved, Specification, isa,
    launch, tell_damaged_profiles,
};
use glinthawk_model::{Model, Source};
use serde::Serialize;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How many kinds of failure are listed after a job.
const FAILURES_TOLD: usize = 3;

/// Runs a job, or continues it.
pub fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    prepare_and_run(args).map_err(|error| typed::with_command(error, args))
}

fn prepare_and_run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let output = output(args);
    let mut files = files(args, &output);
    refuse_collisions(&files)?;
    for (option, path) in [("--stats", &args.stats), ("--trace", &args.cluster.trace)] {
        require_folder(option, path.as_deref())?;
    }
    // Before the model, so that an unreadable input is reported at once. Everything reads this one.
    let mut input = input(args).open()?;
    let planned = args.plan.as_deref().map(Planned::read).transpose()?;
    let mut specification = match &planned {
        Some(planned) => planned.specification(args.specification())?,
        None => args.specification(),
    };
    let opened = with_bars(|tell| Opened::open(&specification, tell))?;
    with_bars(|tell| tell_damaged_profiles(opened.model.config(), tell));
    if let Some(planned) = &planned {
        planned.check_layers(opened.model.config().layers)?;
    }
    files.extend(model_files(&opened.model));
    refuse_collisions(&files)?;
    let survey = input.survey(&opened.served, LINES_SURVEYED)?;
    let interrupted = interrupt::flag()?;
    // Before the weights are loaded, so that results that match no line are reported at once.
    let options = JobOptions { output: output.clone(), earlier: earlier(args) };
    let known = known_model(&opened, &specification)?;
    let prepared = PreparedJob::new(input, &options, known.clone())?;
    // A job of hours must not end with statistics that cannot be written.
    let reports = Reports::open(args)?;
    if let Some(served) = known.filter(|_| nothing_is_left(&prepared, survey.as_ref())) {
        let summary = finish_without_engine(prepared.start(served)?, args)?;
        let resolved = Resolved::new(&specification, &opened, Crowd::UNKNOWN)?;
        let stats = RunStats::of_nothing(resolved.idle(&opened));
        report(args, &summary, &stats, &output);
        reports.write(&Statistics { run: &stats, forecast: None }, &[])?;
        return Ok(exit_code(&summary, args, false));
    }
    let elsewhere =
        planned.as_ref().and_then(|planned| planned.elsewhere(&opened, &specification.topology));
    if let Some(devices) = &elsewhere {
        say(format_args!(
            "the plan was made for {devices}, not for the devices here, so its forecast does not hold"
        ));
    }
    let expected = survey
        .as_ref()
        .and_then(|survey| Expected::of(survey, prepared.standing(), specification.sharing));
    let open = expected.as_ref().filter(|_| planned.is_none());
    let chosen = open.and_then(|job| outlook::chosen_shape(job, &opened, &specification));
    if let Some(shape) = chosen {
        specification = shape.of(specification);
    }
    let crowd = expected.as_ref().map_or(Crowd::UNKNOWN, Expected::crowd);
    let resolved = Resolved::new(&specification, &opened, crowd)?;
    let outlook = expected.as_ref().and_then(|expected| {
        let planned = planned.as_ref().filter(|_| elsewhere.is_none());
        Outlook::of(expected, &opened, &resolved, planned)
    });
    let mut running = with_bars(|tell| launch(&opened, &resolved, &interrupted, tell))?;
    let served =
        with_bars(|tell| opened.identified(&running.kinds, specification.context_type, tell));
    let engine = &mut running.engine;
    // Opened last because this may empty the output: a bad option must not lose anything.
    let mut job = prepared.start(served)?;
    let longest = opened.model.config().context_max;
    if let Some(plan) = planned.as_ref().map(|planned| &planned.plan)
        && plan.max_context < longest
    {
        say(format_args!(
            "contexts hold {} tokens by the plan, and the model's could hold {}: longer answers are cut off",
            units::count(plan.max_context as u64),
            units::count(longest as u64)
        ));
    }
    if let Some(outlook) = &outlook {
        outlook::announce(outlook);
    }
    let mut progress = JobProgress::new(output == Output::Stdout);
    let outcome =
        run_job(engine, &mut job, &interrupted, &mut |engine, job| progress.show(engine, job));
    progress.clear();
    // In any case, make the results durable before saying anything.
    let closed = job.close();
    outcome?;
    let summary = closed?;
    let (stats, nodes) = engine.stats()?;
    if specification.device == Device::Auto
        && specification.topology.is_one_process()
        && !has_driver()
    {
        say("device: cpu (no NVIDIA driver)");
    }
    report(args, &summary, &stats, &output);
    // The forecast covers the whole job. Do not compare it with a run that resumed or was interrupted.
    let whole = summary.complete && summary.resumed == 0 && stats.prompts > 0;
    if let Some(outlook) = outlook.as_ref().filter(|_| whole) {
        outlook::compare(outlook, &stats);
    }
    reports.write(&Statistics { run: &stats, forecast: outlook.as_ref() }, &nodes)?;
    Ok(exit_code(&summary, args, interrupted.load(Ordering::Relaxed)))
}

/// Whether every line of the input has its result already, or there is no line.
fn nothing_is_left(prepared: &PreparedJob, survey: Option<&Survey>) -> bool {
    match prepared.standing() {
        Some(standing) => standing.done == standing.lines,
        None => survey.is_some_and(|survey| survey.lines == 0),
    }
}

/// Ends a job that needs no model: reads its lines once more and finds their results.
fn finish_without_engine(mut job: Job, args: &RunArgs) -> anyhow::Result<JobSummary> {
    loop {
        match job.next(Duration::from_millis(50))? {
            Next::Later => {}
            Next::Exhausted => return Ok(job.close()?),
            Next::Prompt(_) => {
                bail!("{} has changed meanwhile: run the same command again", input(args));
            }
        }
    }
}

fn exit_code(summary: &JobSummary, args: &RunArgs, interrupted: bool) -> ExitCode {
    match summary {
        // Nobody knows what another program did to the results.
        JobSummary { foreign_bytes: 1.., .. } => ExitCode::FAILURE,
        JobSummary { complete: true, failed: 0, .. } => ExitCode::SUCCESS,
        JobSummary { complete: true, .. } => ExitCode::from(EXIT_LINES_FAILED),
        _ => {
            if interrupted {
                say(match output(args) {
                    Output::File(_) if args.overwrite => {
                        "interrupted; the same command without --overwrite continues where it stopped"
                    }
                    Output::File(_) => "interrupted; the same command continues where it stopped",
                    Output::Stdout => "interrupted; with an output file it could be continued",
                });
            }
            ExitCode::FAILURE
        }
    }
}

/// The model with its identity, if that is known before the cluster is there. Workers from elsewhere
/// may have other instruction sets than this machine.
fn known_model(
    opened: &Opened,
    specification: &Specification,
) -> anyhow::Result<Option<Arc<ServedModel>>> {
    if specification.topology.listen.is_some() {
        return Ok(None);
    }
    let kinds = opened.kinds(isa(specification.isa)?, &specification.topology)?;
    Ok(Some(with_bars(|tell| opened.identified(&kinds, specification.context_type, tell))))
}

/// What `--stats` holds: the run, and what was expected of it.
#[derive(Serialize)]
struct Statistics<'a> {
    #[serde(flatten)]
    run: &'a RunStats,
    forecast: Option<&'a Outlook>,
}

fn input(args: &RunArgs) -> Input {
    if is_dash(&args.input) { Input::Stdin } else { Input::File(args.input.clone()) }
}

fn is_dash(path: &Path) -> bool {
    path.as_os_str() == "-"
}

fn output(args: &RunArgs) -> Output {
    let stream = |path: &Path| {
        is_dash(path) || path.metadata().is_ok_and(|what| !what.is_file() && !what.is_dir())
    };
    match &args.output {
        Some(path) if is_dash(path) => Output::Stdout,
        Some(path) => Output::File(path.clone()),
        None if stream(&args.input) => Output::Stdout,
        None => Output::File(default_output(&args.input)),
    }
}

/// `big.jsonl` gives `big.out.jsonl`, `big.txt` gives `big.txt.out.jsonl`: no two inputs share one.
fn default_output(input: &Path) -> PathBuf {
    if input.extension().is_some_and(|ending| ending == "jsonl") {
        return input.with_extension("out.jsonl");
    }
    let mut output = input.as_os_str().to_owned();
    output.push(".out.jsonl");
    PathBuf::from(output)
}

fn earlier(args: &RunArgs) -> Earlier {
    match (args.overwrite, args.keep) {
        (true, _) => Earlier::Overwrite,
        (false, true) => Earlier::Keep,
        (false, false) => Earlier::Continue,
    }
}

/// The files that the options name.
fn files(args: &RunArgs, output: &Output) -> Vec<FileUse> {
    let output = match output {
        Output::File(path) => path,
        // It may be redirected to a file.
        Output::Stdout => Path::new("/dev/stdout"),
    };
    let input = if is_dash(&args.input) { Path::new("/dev/stdin") } else { &args.input };
    let all = &[
        ("the input", Some(input), false),
        ("the output", Some(output), true),
        ("--plan", args.plan.as_deref(), false),
        ("--stats", args.stats.as_deref(), true),
        ("--trace", args.cluster.trace.as_deref(), true),
    ];
    file_uses(all)
}

/// The files of a model, which must not be written either.
fn model_files(model: &Model) -> Vec<FileUse> {
    let paths = match model.source() {
        Source::Gguf { path, .. } => vec![path.clone()],
        Source::Folder(folder) => {
            let entries = folder.read_dir().into_iter().flatten().flatten();
            entries.map(|entry| entry.path()).collect()
        }
        Source::Dummy | Source::Elsewhere => Vec::new(),
    };
    paths.into_iter().map(|path| FileUse { role: "the model's", path, written: false }).collect()
}

/// The reports that the options ask for.
struct Reports<'a> {
    stats: Option<Report<'a>>,
    trace: Option<Report<'a>>,
}

impl<'a> Reports<'a> {
    fn open(args: &'a RunArgs) -> anyhow::Result<Self> {
        let stats = Report::open(args.stats.as_deref())?;
        Ok(Self { stats, trace: Report::open(args.cluster.trace.as_deref())? })
    }

    fn write(self, stats: &Statistics<'_>, nodes: &[NodeReport]) -> anyhow::Result<()> {
        if let Some(file) = self.stats {
            file.write(|out| {
                serde_json::to_writer_pretty(&mut *out, stats)?;
                writeln!(out)
            })?;
        }
        self.trace.map_or(Ok(()), |file| file.write(|out| write_trace(out, nodes)))
    }
}

/// A file for a report that is written when the run is over.
struct Report<'a> {
    file: File,
    path: &'a Path,
}

impl<'a> Report<'a> {
    /// Opens the file and does not change it until there is something to write.
    fn open(path: Option<&'a Path>) -> anyhow::Result<Option<Self>> {
        let Some(path) = path else { return Ok(None) };
        let opened = File::options().write(true).create(true).truncate(false).open(path);
        let file = opened.with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Some(Self { file, path }))
    }

    fn write(
        self,
        content: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
    ) -> anyhow::Result<()> {
        // Devices and pipes have no length.
        let regular = self.file.metadata().is_ok_and(|metadata| metadata.is_file());
        let emptied = if regular { self.file.set_len(0) } else { Ok(()) };
        let mut out = BufWriter::new(self.file);
        let written = emptied.and_then(|()| content(&mut out)).and_then(|()| out.flush());
        written.with_context(|| format!("cannot write {}", self.path.display()))
    }
}

fn report(args: &RunArgs, summary: &JobSummary, stats: &RunStats, output: &Output) {
    say(outcome_line(&input(args).to_string(), summary));
    say_failures(summary);
    match summary.unmatched {
        0 => {}
        1 => say("1 earlier result matches no line of this input and was kept"),
        kept => say(format_args!(
            "{} earlier results match no line of this input and were kept",
            units::count(kept)
        )),
    }
    if stats.prompts > 0 {
        say(format_args!(
            "{} prompt and {} generated tokens in {}: {:.0} tokens/s",
            units::count(stats.prompt_tokens),
            units::count(stats.generated_tokens),
            units::seconds(stats.wall_s),
            stats.tokens_per_second,
        ));
    }
    if let Output::File(path) = output {
        if summary.foreign_bytes > 0 {
            say(format_args!(
                "another program wrote {} to {} during this run; that was left in place. It may have \
                 damaged a result: run the same command again, which redoes what is damaged",
                units::counted(summary.foreign_bytes, "byte"),
                path.display()
            ));
        }
        say(format_args!("results in {}", path.display()));
    }
}

fn outcome_line(input: &str, summary: &JobSummary) -> String {
    let lines = summary.succeeded + summary.failed;
    let answered = format!("{} answered", units::counted(summary.succeeded, "line"));
    let failed = match summary.failed {
        0 => String::new(),
        failed => format!(", {} failed", units::count(failed)),
    };
    match summary.resumed {
        _ if summary.complete && lines == 0 => format!("{input} has no requests"),
        0 => answered + &failed,
        resumed if summary.complete && resumed == lines => {
            format!("nothing to do: every line of {input} has its result ({answered}{failed})")
        }
        resumed => {
            format!("{answered}{failed}, {} of them by an earlier run", units::count(resumed))
        }
    }
}

/// Says why lines failed: the commonest reasons, and where each occurred first.
fn say_failures(summary: &JobSummary) {
    let (told, others) = summary.failures.split_at(summary.failures.len().min(FAILURES_TOLD));
    for kind in told {
        let more = match kind.lines {
            1 => String::new(),
            lines => format!(" and {} more", units::count(lines - 1)),
        };
        say(format_args!("  line {}{more}: {}", kind.first_line, kind.reason));
    }
    let told: u64 = told.iter().map(|kind| kind.lines).sum();
    if !others.is_empty() {
        let left = units::counted(summary.failed.saturating_sub(told), "line");
        let kinds = units::counted(others.len() as u64, "other reason");
        say(format_args!("  {left} failed for {kinds}"));
    }
}
