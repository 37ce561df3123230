//! The sha256 of weight files. A big file is hashed once: its hash is kept in the cache folder for as
//! long as the file stays the same by path, size, times and inode.

use crate::catalogue::cache_folder;
use crate::source::MappedFile;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::{self, Metadata};
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A file that changed this recently may change again without its times telling: clocks of file
/// systems tick as slowly as every two seconds.
const SETTLED_AFTER: Duration = Duration::from_secs(2);

/// Bytes hashed between two words about progress.
const CHUNK_BYTES: usize = 1 << 24;

/// What a file looks like from outside. `changed` (ctime) also moves where a tool sets the time of
/// modification back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    /// Seconds and nanoseconds since 1970.
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    #[cfg(unix)]
    fn of(file: &Metadata) -> Option<Self> {
        use std::os::unix::fs::MetadataExt;
        Some(Self {
            device: file.dev(),
            inode: file.ino(),
            bytes: file.len(),
            modified: (file.mtime(), file.mtime_nsec()),
            changed: (file.ctime(), file.ctime_nsec()),
        })
    }

    #[cfg(not(unix))]
    fn of(_file: &Metadata) -> Option<Self> {
        None
    }

    /// Whether the file had not changed for a while at this time.
    fn is_settled(&self, now: SystemTime) -> bool {
        let Ok(now) = now.duration_since(UNIX_EPOCH) else { return false };
        let latest = self.modified.max(self.changed);
        let limit = now.saturating_sub(SETTLED_AFTER);
        latest < (limit.as_secs() as i64, i64::from(limit.subsec_nanos()))
    }
}

/// A kept hash.
#[derive(Serialize, Deserialize)]
struct Kept {
    stamp: Stamp,
    sha256: [u8; 32],
}

/// The folder of kept hashes. Where there is none, or it cannot be used, files are hashed each time.
pub(crate) struct Hashes {
    folder: Option<PathBuf>,
}

impl Hashes {
    /// Those in the user's cache folder.
    pub(crate) fn kept() -> Self {
        Self { folder: cache_folder().ok().map(|folder| folder.join("hashes")) }
    }

    /// A file's hash; `hashed` is told of bytes as they are done with.
    pub(crate) fn sha256(&self, file: &MappedFile, hashed: &(dyn Fn(u64) + Sync)) -> [u8; 32] {
        self.sha256_at(file, SystemTime::now(), hashed)
    }

    fn sha256_at(
        &self,
        file: &MappedFile,
        now: SystemTime,
        hashed: &(dyn Fn(u64) + Sync),
    ) -> [u8; 32] {
        let stamp = || file.metadata().ok().as_ref().and_then(Stamp::of);
        let before = stamp();
        let entry = self.entry(file);
        if let Some(sha256) = read_kept(entry.as_ref(), before) {
            hashed(file.len() as u64);
            return sha256;
        }
        let mut hash = Sha256::new();
        for chunk in file.chunks(CHUNK_BYTES) {
            hash.update(chunk);
            file.has_read(chunk.len());
            hashed(chunk.len() as u64);
        }
        let sha256 = hash.finalize().into();
        if let (Some(entry), Some(stamp)) =
            (entry, before.filter(|before| stamp() == Some(*before)))
            && stamp.is_settled(now)
        {
            // A hash that cannot be kept costs time, never a result.
            _ = write_kept(&entry, &Kept { stamp, sha256 });
        }
        sha256
    }

    /// Where a file's hash is kept: named for its path.
    fn entry(&self, file: &MappedFile) -> Option<PathBuf> {
        let path = file.path().canonicalize().ok()?;
        let name = Sha256::digest(path.as_os_str().as_encoded_bytes());
        let name: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
        Some(self.folder.as_ref()?.join(format!("{name}.json")))
    }
}

/// The kept hash of a file that looks like this; none where it looked otherwise or what is kept
/// cannot be read.
fn read_kept(entry: Option<&PathBuf>, stamp: Option<Stamp>) -> Option<[u8; 32]> {
    let kept: Kept = serde_json::from_slice(&fs::read(entry?).ok()?).ok()?;
    (Some(kept.stamp) == stamp).then_some(kept.sha256)
}

/// Written beside and renamed, so that another process reads the old or the new, never a half.
fn write_kept(entry: &PathBuf, kept: &Kept) -> std::io::Result<()> {
    let folder = entry.parent().expect("an entry lies in the folder of hashes");
    fs::create_dir_all(folder)?;
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // As any file of the cache, less what the umask forbids: a cache may be shared.
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    let mut file = builder.tempfile_in(folder)?;
    file.write_all(&serde_json::to_vec(kept)?)?;
    file.persist(entry)?;
    Ok(())
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::path::Path;
    use std::sync::atomic::{AtomicU64, Ordering};
    use tempfile::TempDir;

    struct Case {
        folder: TempDir,
        hashes: Hashes,
    }

    impl Case {
        fn new() -> Self {
            let folder = TempDir::new().unwrap();
            let hashes = Hashes { folder: Some(folder.path().join("hashes")) };
            let case = Self { folder, hashes };
            case.write(b"weights");
            case
        }

        fn file(&self) -> PathBuf {
            self.folder.path().join("model.safetensors")
        }

        fn write(&self, bytes: &[u8]) {
            fs::write(self.file(), bytes).unwrap();
        }

        /// The hash as of a minute from now, when nothing here is recent any more.
        fn sha256(&self) -> [u8; 32] {
            self.sha256_at(SystemTime::now() + Duration::from_secs(60))
        }

        fn sha256_at(&self, now: SystemTime) -> [u8; 32] {
            let file = MappedFile::open(&self.file()).unwrap();
            let hashed = AtomicU64::new(0);
            let count = |bytes| {
                hashed.fetch_add(bytes, Ordering::Relaxed);
            };
            let sha256 = self.hashes.sha256_at(&file, now, &count);
            assert_eq!(hashed.into_inner(), file.len() as u64);
            sha256
        }

        fn entries(&self) -> Vec<PathBuf> {
            let entries = fs::read_dir(self.folder.path().join("hashes")).into_iter().flatten();
            entries.map(|entry| entry.unwrap().path()).collect()
        }

        /// Puts another hash in the place of the kept one, to see whether it is used.
        fn forge(&self) -> [u8; 32] {
            let [entry] = self.entries().try_into().expect("one entry");
            let kept: Kept = serde_json::from_slice(&fs::read(&entry).unwrap()).unwrap();
            write_kept(&entry, &Kept { sha256: [7; 32], ..kept }).unwrap();
            [7; 32]
        }
    }

    fn plain(bytes: &[u8]) -> [u8; 32] {
        Sha256::digest(bytes).into()
    }

    #[test]
    fn a_hash_is_kept_until_the_file_changes() {
        let case = Case::new();
        assert_eq!(case.sha256(), plain(b"weights"));
        let forged = case.forge();
        assert_eq!(case.sha256(), forged);
        case.write(b"Weights");
        assert_eq!(case.sha256(), plain(b"Weights"));
        assert_eq!(case.entries().len(), 1, "nothing is left lying about");
    }

    #[test]
    fn a_file_set_back_in_time_is_hashed_again() {
        let case = Case::new();
        let modified = fs::metadata(case.file()).unwrap().modified().unwrap();
        case.sha256();
        case.forge();
        let file = fs::OpenOptions::new().write(true).open(case.file()).unwrap();
        (&file).write_all(b"WEIGHTS").unwrap();
        file.set_modified(modified).unwrap();
        assert_eq!(case.sha256(), plain(b"WEIGHTS"));
    }

    #[test]
    fn the_hash_of_a_file_that_just_changed_is_not_kept() {
        let case = Case::new();
        let now = fs::metadata(case.file()).unwrap().modified().unwrap();
        for now in [now - Duration::from_secs(60), now, now + Duration::from_secs(1)] {
            assert_eq!(case.sha256_at(now), plain(b"weights"));
            assert_eq!(case.entries(), [] as [&Path; 0]);
        }
        case.sha256_at(now + Duration::from_secs(3));
        assert_eq!(case.entries().len(), 1);
    }

    #[test]
    fn an_entry_has_the_permissions_of_any_file() {
        use std::os::unix::fs::PermissionsExt;
        let case = Case::new();
        case.sha256();
        let [entry] = case.entries().try_into().expect("one entry");
        let beside = entry.with_extension("beside");
        fs::write(&beside, "").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&entry), mode(&beside));
    }

    #[test]
    fn a_broken_entry_is_made_anew() {
        let case = Case::new();
        case.sha256();
        let [entry] = case.entries().try_into().expect("one entry");
        let whole = fs::read(&entry).unwrap();
        for broken in [&b""[..], b"{}", b"\xff\xff", &whole[..whole.len() / 2]] {
            fs::write(&entry, broken).unwrap();
            assert_eq!(case.sha256(), plain(b"weights"));
            assert_eq!(fs::read(&entry).unwrap(), whole);
        }
    }

    #[test]
    fn without_a_folder_to_keep_them_files_are_hashed_each_time() {
        let mut case = Case::new();
        // A file where the folder should be: no user may write there, not even root.
        case.hashes.folder = Some(case.file().join("hashes"));
        assert_eq!(case.sha256(), plain(b"weights"));
        case.hashes.folder = None;
        assert_eq!(case.sha256(), plain(b"weights"));
    }

    #[test]
    fn many_that_write_at_once_leave_a_whole_entry() {
        let case = Case::new();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| assert_eq!(case.sha256(), plain(b"weights")));
            }
        });
        let forged = case.forge();
        assert_eq!(case.sha256(), forged);
    }
}
