//! Clusters of real processes for the tests: dispatchers that listen, workers that join, and which
//! of them still run.

use crate::common::{Case, Finished, glinthawk, lines_in, mixed_requests};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

/// What all workers of a test's cluster share.
pub const TOKEN: &str = "a secret of the tests";

/// The environment variable it is in.
pub const TOKEN_VARIABLE: &str = "GLINTHAWK_TOKEN";

/// Pause between two looks at something that changes by itself.
pub const LOOK: Duration = Duration::from_millis(1);

/// Long enough for anything that ends by itself. What takes longer hangs.
pub const HANGS: Duration = Duration::from_secs(300);

/// A job of so many lines.
pub const LINES: usize = 200;

/// Two slices, each with its Tier-2 node: four workers. Slow enough, without using a core, to be
/// caught half-way.
pub const CLUSTER: [&str; 10] =
    ["--tier1", "2", "--tier2", "1", "--batch", "8", "--flights", "2", "--delay", "2ms"];

/// A job, and what one undisturbed process makes of it.
pub struct Story {
    pub case: Case,
    pub expected: Vec<String>,
}

impl Story {
    pub fn new() -> Self {
        let case = Case::new(mixed_requests(LINES as u64, 4, 16));
        case.run(&[]).expect(0);
        let expected = case.results();
        fs::remove_file(case.output()).expect("the output of one process");
        Self { case, expected }
    }
}

/// A process that does not outlive its test.
pub struct Running {
    child: Option<Child>,
    reader: Option<JoinHandle<String>>,
    /// What it said before it was left to itself.
    said: String,
}

impl Running {
    pub fn start(command: &mut Command) -> Self {
        let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
        Self { child: Some(child.expect("the binary starts")), reader: None, said: String::new() }
    }

    /// Starts and reads up to the line that holds `mark`, which is returned.
    pub fn start_until(command: &mut Command, mark: &str) -> (Self, String) {
        let mut running = Self::start(command);
        let mut stderr = BufReader::new(running.stderr());
        let line = loop {
            let mut line = String::new();
            let read = stderr.read_line(&mut line).expect("text on standard error");
            assert!(read > 0, "ended without \"{mark}\": {}", running.said);
            running.said += &line;
            if line.contains(mark) {
                break line;
            }
        };
        running.reader = Some(std::thread::spawn(move || {
            let mut rest = String::new();
            stderr.read_to_string(&mut rest).expect("text on standard error");
            rest
        }));
        (running, line)
    }

    fn stderr(&mut self) -> ChildStderr {
        let child = self.child.as_mut().expect("it was not waited for");
        child.stderr.take().expect("standard error is piped")
    }

    fn child(&self) -> &Child {
        self.child.as_ref().expect("it was not waited for")
    }

    pub fn process(&self) -> Process {
        Process::of(self.child().id()).expect("it is there until it is waited for")
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(self.child()), signal).expect("the process is ours");
    }

    pub fn has_ended(&mut self) -> bool {
        let child = self.child.as_mut().expect("it was not waited for");
        child.try_wait().expect("it can be asked").is_some()
    }

    pub fn finish(mut self) -> Finished {
        let started = Instant::now();
        while !self.has_ended() {
            assert!(started.elapsed() < HANGS, "it hangs");
            sleep(LOOK);
        }
        let mut finished = Finished::wait(self.child.take().expect("it was not waited for"));
        if let Some(reader) = self.reader.take() {
            finished.stderr = reader.join().expect("the reader does not panic");
        }
        finished.stderr.insert_str(0, &self.said);
        finished
    }

    /// Waits until the output has this many lines; the run must not end before.
    #[track_caller]
    pub fn wait_for_lines(&mut self, output: &Path, lines: usize) {
        while lines_in(output) < lines {
            assert!(!self.has_ended(), "ended before it had {lines} lines");
            sleep(LOOK);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // It may have ended by itself, which is as well.
            _ = child.kill();
            _ = child.wait();
        }
    }
}

/// A process by its id and start time, so that a reused id is not mistaken for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Process {
    started: u64,
    id: u32,
}

impl Process {
    /// The process of this id, unless it has ended.
    fn of(id: u32) -> Option<Self> {
        Self::with_parent(id).map(|(process, _)| process)
    }

    fn with_parent(id: u32) -> Option<(Self, u32)> {
        let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
        // The name before it is in brackets and may hold anything.
        let fields: Vec<&str> = stat[stat.rfind(')')? + 1..].split_whitespace().collect();
        let (state, parent, started) = (fields[0], fields[1], fields[19]);
        let process = Self { id, started: started.parse().ok()? };
        // A zombie has ended, even if its parent has not reaped it.
        (state != "Z").then_some((process, parent.parse().ok()?))
    }

    pub fn children(self) -> Vec<Self> {
        let entries = fs::read_dir("/proc").expect("processes are listed");
        let ids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let processes = ids.filter_map(Self::with_parent);
        processes.filter(|(_, parent)| *parent == self.id).map(|(process, _)| process).collect()
    }

    pub fn id(self) -> u32 {
        self.id
    }

    pub fn kill(self) {
        self.signal(Signal::KILL);
    }

    pub fn signal(self, signal: Signal) {
        let id = Pid::from_raw(self.id as i32).expect("an id");
        kill_process(id, signal).expect("the process is ours");
    }

    pub fn is_there(self) -> bool {
        Self::of(self.id) == Some(self)
    }
}

/// All of them end by themselves.
#[track_caller]
pub fn expect_gone(processes: &[Process]) {
    let started = Instant::now();
    while let Some(process) = processes.iter().find(|process| process.is_there()) {
        assert!(started.elapsed() < HANGS, "{process:?} is still there");
        sleep(LOOK);
    }
}

/// A dispatcher that waits for workers.
pub struct Dispatcher {
    pub running: Running,
    pub address: String,
}

impl Dispatcher {
    /// `glinthawk run --listen` of a case; returns once it waits.
    pub fn listen(case: &Case, address: &str, options: &[&str]) -> Self {
        let mut command = case.command(options);
        Self::start(command.args(["--listen", address]))
    }

    pub fn start(command: &mut Command) -> Self {
        let command = command.env(TOKEN_VARIABLE, TOKEN);
        let (running, line) = Running::start_until(command, "waiting at ");
        let address = line.split_whitespace().nth(2).expect("an address").to_owned();
        Self { running, address }
    }

    pub fn worker(&self, options: &[&str]) -> Running {
        Running::start(&mut worker(&self.address, options))
    }
}

/// `glinthawk worker` that joins a dispatcher and has the token.
pub fn worker(address: &str, options: &[&str]) -> Command {
    let mut command = glinthawk(["worker", "--join", address, "--context-memory", "16MiB"]);
    if !options.contains(&"--threads") {
        command.args(["--threads", "1"]);
    }
    command.args(options).env(TOKEN_VARIABLE, TOKEN);
    command
}
