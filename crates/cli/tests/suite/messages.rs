//! What the program says when something is wrong: a sentence that names the problem and what to do.

use crate::common::{Case, Finished, TINY, glinthawk};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

#[test]
fn options_that_do_nothing_are_bad_usage() {
    let case = Case::new("{\"prompt\":\"hello\"}\n");
    let model = "nosuch"; // It is not even looked for.
    let case = Case { model: model.to_owned(), ..case };
    let stats = case.path("stats.json");
    fs::write(&stats, "of an earlier run").expect("written");
    let cases: [(&[&str], &[&str]); 12] = [
        (&["--insecure"], &["--insecure does nothing without --listen"]),
        (&["--replace-within", "5s"], &["--replace-within does nothing in one process"]),
        (&["--tier1", "2", "--secret-file", "x"], &["--secret-file does nothing", "--listen"]),
        (&["--hybrid"], &["--hybrid", "--tier2 1"]),
        (&["--delay", "1ms"], &["--delay", "--tier2 1"]),
        (&["--bandwidth", "1gbit"], &["--bandwidth", "--tier2 1"]),
        (&["--tier1", "2", "--hybrid"], &["--hybrid", "--tier2 1"]),
        (&["--tier1", "1", "--tier2", "0", "--delay", "1ms"], &["--delay", "--tier2 1"]),
        (&["--listen", "127.0.0.1:0", "--workers", "1", "--delay", "1ms"], &["--delay"]),
        (
            &["--listen", "127.0.0.1:0", "--workers", "3", "--tier1", "2", "--tier2", "0"],
            &["--workers 3", "need 2 workers"],
        ),
        (&["--tier1", "1", "--tier2", "1", "--threads", "1"], &["--threads", "cores"]),
        (&["--threads", "1024"], &["--threads 1024", "may use", "at most"]),
    ];
    for (options, parts) in cases {
        let mut command = case.command(options);
        let finished = Finished::of(command.arg("--stats").arg(&stats)).expect(2);
        for part in parts.iter().chain(&["error: ", "--help"]) {
            assert!(finished.stderr.contains(part), "{options:?}: {}", finished.stderr);
        }
    }
    assert_eq!(fs::read_to_string(stats).expect("it is there"), "of an earlier run");
    for options in [["--join", "somewhere"], ["--join", "10.0.0.1:99999"]] {
        let refused = Finished::of(glinthawk(["worker"]).args(options)).expect(2);
        assert!(refused.stderr.contains("HOST:PORT, such as"), "{}", refused.stderr);
    }
    for command in ["generate", "bench", "profile", "worker"] {
        let mut command = glinthawk([command, "--threads", "1024"]);
        match command.get_args().next().and_then(|name| name.to_str()) {
            Some("generate") => command.arg("hello"),
            Some("worker") => {
                command.args(["--join", "127.0.0.1:1"]).env("GLINTHAWK_TOKEN", "0123456789abcdef")
            }
            _ => &mut command,
        };
        let finished = Finished::of(&mut command).expect(2);
        assert!(finished.stderr.contains("--threads 1024 is too many"), "{}", finished.stderr);
    }
}

#[test]
fn a_missing_secret_is_explained() {
    let case = Case::new("{\"prompt\":\"hello\"}\n");
    let parts = ["GLINTHAWK_TOKEN is not set", "secret", "export GLINTHAWK_TOKEN="];
    let mut worker = glinthawk(["worker", "--join", "127.0.0.1:1"]);
    Finished::of(worker.env_remove("GLINTHAWK_TOKEN")).expect_error(&parts);
    let mut run = case.command(&["--listen", "127.0.0.1:0", "--workers", "1"]);
    Finished::of(run.env_remove("GLINTHAWK_TOKEN")).expect_error(&parts);
}

#[test]
fn a_secret_that_can_be_guessed_is_refused() {
    let case = Case::new("{\"prompt\":\"hello\"}\n");
    let file = case.path("secret");
    let (path, long) = (file.to_str().expect("a path of text"), "x".repeat(5000));
    let guessed = "can be guessed: 16 is the least, and `openssl rand -hex 32` makes a good one";
    for (secret, part) in
        [("", guessed), ("fifteen letters\n", guessed), (&long, "holds no secret")]
    {
        fs::write(&file, secret).expect("written");
        let worker = &mut glinthawk(["worker", "--join", "127.0.0.1:1", "--secret-file", path]);
        Finished::of(worker).expect_error(&[path, part]);
        if secret.len() < 16 {
            let mut run = case.command(&["--listen", "0.0.0.0:0", "--workers", "1", "--insecure"]);
            Finished::of(run.env("GLINTHAWK_TOKEN", secret))
                .expect_error(&["GLINTHAWK_TOKEN", part]);
        }
    }
    let mut missing = glinthawk(["worker", "--join", "127.0.0.1:1", "--secret-file", "not there"]);
    Finished::of(&mut missing).expect_error(&["cannot read the secret in not there"]);
}

#[test]
fn memory_that_is_not_there_is_named_with_its_size_and_option() {
    let case = Case::new("{\"prompt\":\"hello\"}\n");
    // Contexts of more bytes than there are addresses, and a slab that hardly any machine has; nothing is touched.
    let case = Case { model: "dummy:smollm2-135m".to_owned(), ..case };
    let refused =
        case.run(&["--context-memory", "900TiB", "--batch", "65536", "--flights", "1024"]);
    refused.expect_error(&["no room in memory for", "iB: give less with --"]);
}

#[test]
fn a_worker_offers_no_memory_that_is_not_there() {
    let mut worker = glinthawk(["worker", "--join", "127.0.0.1:1", "--context-memory", "999TiB"]);
    let worker = worker.args(["--device", "cpu"]).env("GLINTHAWK_TOKEN", "0123456789abcdef");
    Finished::of(worker).expect_error(&["--context-memory asks for 999.0 TiB", " free"]);
}

#[test]
fn too_little_context_memory_is_told_with_what_would_do() {
    let case = Case::new("{\"prompt\":\"hello\",\"max_tokens\":2}\n");
    let refused = case.run(&["--context-memory", "1"]);
    let said = refused.expect_error(&["has 1 byte: give at least --context-memory "]).stderr;
    let (_, rest) = said.split_once("at least --context-memory ").expect("it is said");
    let least = rest.split([',', '\n']).next().expect("a size");
    case.run(&["--context-memory", least]).expect(0);
}

#[test]
fn a_report_whose_folder_is_missing_is_refused_before_anything_runs() {
    let case = Case::new("{\"prompt\":\"hello\"}\n");
    let case = Case { model: "nosuch".to_owned(), ..case }; // It is not even looked for.
    for option in ["--stats", "--trace"] {
        let path = case.path("newdir/x.json");
        let refused = Finished::of(case.command(&[option]).arg(&path));
        let (path, folder) = (path.display(), case.path("newdir"));
        let text = format!("{option} {path}: folder {} does not exist", folder.display());
        refused.expect_error(&[&text]);
    }
    assert!(!case.output().exists());
}

#[test]
fn a_folder_without_a_configuration_holds_no_model() {
    let case = Case::new("{\"prompt\":\"hello\"}\n");
    let folder = case.path("folder");
    fs::create_dir(&folder).expect("made");
    let model = folder.to_str().expect("a path of text").to_owned();
    let refused = |parts: &[&str]| {
        let case =
            Case { model: model.clone(), folder: tempfile::TempDir::new().expect("a folder") };
        fs::write(case.input(), "{\"prompt\":\"hello\"}\n").expect("written");
        case.run(&[]).expect_error(parts);
    };
    let sentence = format!("{model} holds no model: config.json is missing");
    refused(&[&sentence, "safetensors"]);
    fs::write(folder.join("some.gguf"), "").expect("written");
    refused(&[&sentence, "did you mean", "folder/some.gguf?"]);
}

#[test]
fn a_cache_that_cannot_be_written_is_named() {
    let folder = tempfile::TempDir::new().expect("a folder");
    // A file in place of a folder stops even root.
    let cache = folder.path().join("cache");
    fs::write(&cache, "").expect("written");
    fs::set_permissions(&cache, fs::Permissions::from_mode(0o400)).expect("set");
    for command in [&["pull"][..], &["profile", "--brief", "--model", TINY]] {
        let mut command = glinthawk(command);
        let finished = Finished::of(command.env("GLINTHAWK_CACHE", &cache)).expect(1);
        let last = finished.stderr.lines().last().expect("an error");
        let name = cache.to_str().expect("text");
        assert!(last.contains(name) && last.contains("set GLINTHAWK_CACHE to a folder"), "{last}");
    }
}

/// A memory cgroup of our own, if this machine lets us have one.
struct Group(PathBuf);

impl Group {
    fn new(limit_bytes: u64) -> Option<Self> {
        let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
        let own = |controllers: &str| {
            groups.lines().find_map(|line| {
                let (_, rest) = line.split_once(':')?;
                let (names, path) = rest.split_once(':')?;
                names.split(',').any(|name| name == controllers).then(|| path.to_owned())
            })
        };
        let root = PathBuf::from("/sys/fs/cgroup");
        let (parent, limit) = match own("memory") {
            Some(path) => (root.join("memory").join(&path[1..]), "memory.limit_in_bytes"),
            None => (root.join(&own("")?[1..]), "memory.max"),
        };
        let group = Self(parent.join(format!("glinthawk-test-{}", std::process::id())));
        fs::create_dir(&group.0).ok()?;
        fs::write(group.0.join(limit), limit_bytes.to_string()).ok()?;
        Some(group)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // What ended in it may be counted there for a moment.
        for _ in 0..1000 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::yield_now();
        }
    }
}

#[test]
fn default_context_memory_heeds_the_cgroup() {
    const LIMIT: u64 = 64 << 20;
    let Some(group) = Group::new(LIMIT) else {
        eprintln!("skipped: no memory cgroup can be made here");
        return;
    };
    let case = Case::new(crate::common::mixed_requests(4, 4, 8));
    let inner = case.command(&[]);
    let mut command = Command::new("sh");
    let enter = "echo $$ > \"$1\"/cgroup.procs && shift && exec \"$@\"";
    command.args(["-c", enter, "sh"]).arg(&group.0).arg(inner.get_program());
    let stats = case.path("stats.json");
    command.args(inner.get_args()).arg("--stats").arg(&stats);
    let finished = Finished::of(&mut command);
    if finished.stderr.contains("cgroup.procs") {
        eprintln!("skipped: no process can be moved into a cgroup here: {}", finished.stderr);
        return;
    }
    finished.expect(0);
    let stats = fs::read(stats).expect("there are statistics");
    let stats: Value = serde_json::from_slice(&stats).expect("statistics are JSON");
    let given = stats["context_memory_bytes"].as_u64().expect("a size");
    assert!(given > 0 && given < LIMIT, "{given} bytes for contexts in a cgroup of {LIMIT}");
}
