//! What was found once and is kept on disk for the next start: compiled kernels, chosen algorithms. An entry's name is a
//! hash of everything that decides its content, so nothing is ever out of date. What cannot be read, or was damaged, is
//! found again and written anew.

use glinthawk_model::catalogue::cache_folder;
use sha2::{Digest, Sha256};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Bytes of a hash.
const HASH_BYTES: usize = 32;

/// An entry of the cache.
pub(super) struct Entry {
    /// `None` without a cache folder.
    path: Option<PathBuf>,
    key: String,
}

impl Entry {
    /// The entry of a key among its like.
    pub(super) fn new(like: &str, key: String) -> Self {
        let folder = cache_folder().ok().map(|folder| folder.join("cuda"));
        Self::within(folder.as_deref(), like, key)
    }

    fn within(folder: Option<&Path>, like: &str, key: String) -> Self {
        let name: String = hash(&[&key]).iter().map(|byte| format!("{byte:02x}")).collect();
        Self { path: folder.map(|folder| folder.join(format!("{like}-{name}"))), key }
    }

    /// What was kept, if it is there and whole.
    pub(super) fn read(&self) -> Option<Vec<u8>> {
        let mut bytes = std::fs::read(self.path.as_ref()?).ok()?;
        let content = bytes.split_off(HASH_BYTES.min(bytes.len()));
        (bytes == hash(&[self.key.as_bytes(), &content])).then_some(content)
    }

    /// Keeps content: written beside and renamed, so that nobody reads a half. Where it cannot be written, the next
    /// start takes as long as this one, and nothing else is lost.
    pub(super) fn write(&self, content: &[u8]) {
        let Some(path) = &self.path else { return };
        let written = || -> std::io::Result<()> {
            let folder = path.parent().unwrap_or(Path::new("."));
            std::fs::create_dir_all(folder)?;
            let mut builder = tempfile::Builder::new();
            #[cfg(unix)]
            {
                use std::os::unix::fs::PermissionsExt;
                // As any file of the cache, less what the umask forbids: a cache may be shared.
                builder.permissions(std::fs::Permissions::from_mode(0o666));
            }
            let mut file = builder.tempfile_in(folder)?;
            file.write_all(&hash(&[self.key.as_bytes(), content]))?;
            file.write_all(content)?;
            file.persist(path)?;
            Ok(())
        };
        _ = written();
    }
}

/// A hash of parts and their lengths.
fn hash(parts: &[impl AsRef<[u8]>]) -> [u8; HASH_BYTES] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.as_ref().len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_whole_or_not_there() {
        let folder = tempfile::tempdir().unwrap();
        let entry = |key: &str| Entry::within(Some(folder.path()), "kernels", key.to_owned());
        let (one, other) = (entry("one"), entry("other"));
        assert_eq!(one.read(), None);
        one.write(b"content");
        assert_eq!(one.read().as_deref(), Some(&b"content"[..]));
        assert_eq!(other.read(), None);
        // Another key's content under this name, a changed byte, half a file, none of it.
        let path = one.path.clone().unwrap();
        let whole = std::fs::read(&path).unwrap();
        other.write(b"content");
        let mut changed = whole.clone();
        *changed.last_mut().unwrap() ^= 1;
        let stranger = std::fs::read(other.path.as_ref().unwrap()).unwrap();
        for damaged in [&stranger[..], &changed, &whole[..20], &[]] {
            std::fs::write(&path, damaged).unwrap();
            assert_eq!(one.read(), None, "{} bytes", damaged.len());
        }
        one.write(b"new");
        assert_eq!(one.read().as_deref(), Some(&b"new"[..]));
        // A folder that cannot be made is no reason to fail.
        let nowhere = Entry::within(Some(&path.join("below a file")), "kernels", String::new());
        nowhere.write(b"content");
        assert_eq!(nowhere.read(), None);
        assert_eq!(Entry::within(None, "kernels", String::new()).read(), None);
    }
}
