//! Files of one command that must not be the same file, under any name.

use crate::error::JobError;
use crate::file_use::FileUse;
use crate::journal::folder_of;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The most links that are followed from a name to a file that does not exist yet.
const LINKS_MAX: usize = 40;

/// What distinguishes one file from another.
#[derive(PartialEq, Eq)]
enum Identity {
    /// Device and inode: a file may have several names.
    Inode(u64, u64),
    /// Folder and name of a file that is not there yet.
    Place(PathBuf, OsString),
}

/// Fails if a file that is written is also used for something else. Streams and devices may be
/// used for several things.
pub fn refuse_collisions(files: &[FileUse]) -> Result<(), JobError> {
    let identities: Vec<_> = files.iter().map(|file| identity(&file.path, LINKS_MAX)).collect();
    for (index, file) in files.iter().enumerate() {
        let earlier = files[..index].iter().zip(&identities);
        for (other, identity) in earlier {
            let same = identity.is_some() && *identity == identities[index];
            if same && (file.written || other.written) {
                return Err(JobError::Collision { file: file.clone(), other: other.clone() });
            }
        }
    }
    Ok(())
}

fn identity(path: &Path, links_left: usize) -> Option<Identity> {
    if let Ok(metadata) = fs::metadata(path) {
        return metadata.is_file().then(|| Identity::Inode(metadata.dev(), metadata.ino()));
    }
    let folder = folder_of(path);
    // A link to a file that is not there yet: writing makes the file.
    if let Ok(target) = fs::read_link(path) {
        return identity(&folder.join(target), links_left.checked_sub(1)?);
    }
    Some(Identity::Place(folder.canonicalize().ok()?, path.file_name()?.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn one_file_under_two_names_is_one_file() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("file"), "").unwrap();
        fs::write(at("other"), "").unwrap();
        fs::hard_link(at("file"), at("hard")).unwrap();
        symlink(at("file"), at("soft")).unwrap();
        symlink("new", at("dangling")).unwrap();
        symlink("loop", at("loop")).unwrap();
        fs::create_dir(at("folder")).unwrap();
        symlink(folder.path(), at("folder/back")).unwrap();
        let check = |one: &str, two: &str, collide: bool| {
            for (first, second, refused) in [
                (true, true, collide),
                (false, true, collide),
                (true, false, collide),
                (false, false, false),
            ] {
                let file =
                    |name: &str, written| FileUse { role: "a file", path: at(name), written };
                let outcome = refuse_collisions(&[file(one, first), file(two, second)]);
                assert_eq!(outcome.is_err(), refused, "{one} and {two}");
            }
        };
        check("file", "file", true);
        check("file", "./file", true);
        check("file", "hard", true);
        check("soft", "hard", true);
        check("file", "folder/back/file", true);
        check("file", "other", false);
        check("new", "new", true);
        check("new", "folder/../new", true);
        check("dangling", "folder/back/new", true);
        check("new", "file", false);
        check("folder/new", "new", false);
        check("loop", "loop", false);
        check("nowhere/new", "nowhere/new", false);
        check("/dev/null", "/dev/null", false);
    }
}
