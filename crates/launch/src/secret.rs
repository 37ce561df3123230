//! The cluster's secret: where it comes from, and what is good enough to be one. It is never an argument, which
//! every user of the machine could read.

use crate::error::LaunchError;
use glinthawk_cluster::TOKEN_VARIABLE;
use glinthawk_cluster::net::Encryption;
use std::env::VarError;
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::Read;
use std::path::Path;

/// Shorter secrets can be guessed.
const CHARACTERS_MIN: usize = 16;

/// A file longer than this holds something else.
const FILE_BYTES_MAX: usize = 4096;

/// The secret of a cluster whose workers come from elsewhere: in this file or, without one, in the environment.
pub fn cluster_secret(file: Option<&Path>) -> Result<String, LaunchError> {
    let (secret, place) = match file {
        Some(path) => (read_file(path)?, path.display().to_string()),
        None => (read_environment()?, TOKEN_VARIABLE.to_owned()),
    };
    let secret = secret.trim();
    let characters = secret.chars().count();
    if characters < CHARACTERS_MIN {
        return Err(LaunchError::ShortSecret { place, characters, least: CHARACTERS_MIN });
    }
    Ok(secret.to_owned())
}

fn read_file(path: &Path) -> Result<String, LaunchError> {
    let mut secret = String::new();
    let read = File::open(path)
        .and_then(|file| file.take(FILE_BYTES_MAX as u64 + 1).read_to_string(&mut secret));
    if let Err(source) = read {
        return Err(LaunchError::SecretFile { path: path.to_owned(), source });
    }
    if secret.len() > FILE_BYTES_MAX {
        return Err(LaunchError::LongSecret { path: path.to_owned(), most: FILE_BYTES_MAX });
    }
    Ok(secret)
}

fn read_environment() -> Result<String, LaunchError> {
    std::env::var(TOKEN_VARIABLE).map_err(|error| match error {
        VarError::NotPresent => LaunchError::NoToken,
        VarError::NotUnicode(_) => LaunchError::BadToken,
    })
}

/// A secret for processes of this machine only.
pub(crate) fn random() -> String {
    let random = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", random(), random())
}

/// Which connections of a cluster are encrypted.
pub fn encryption(insecure: bool) -> Encryption {
    if insecure { Encryption::Never } else { Encryption::BeyondLoopback }
}
