//! Finds a model's chat template among its files.

use super::{ChatError, ChatTemplate};
use crate::model::{Model, Source};
use crate::source::gguf::Metadata;
use serde::Deserialize;
use std::path::Path;

/// Longer than any template; a file that is longer is something else.
const FILE_BYTES_MAX: u64 = 1 << 26;

/// The field of `tokenizer_config.json` that matters here.
#[derive(Deserialize)]
struct TokenizerConfig {
    chat_template: Option<Templates>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

impl ChatTemplate {
    /// The template among a model's files; `None` if the model has none.
    pub fn of(model: &Model) -> Result<Option<Self>, ChatError> {
        match model.source() {
            Source::Gguf { path, metadata } => Self::from_gguf(path, metadata),
            Source::Folder(folder) => Self::from_folder(folder),
            Source::Dummy | Source::Elsewhere => Ok(None),
        }
    }

    /// From a folder's `chat_template.jinja`, else its `tokenizer_config.json`; `None` if the
    /// model has no template.
    pub fn from_folder(folder: &Path) -> Result<Option<Self>, ChatError> {
        let path = folder.join("chat_template.jinja");
        if let Some(source) = read(&path)? {
            return Self::new(&source, path.to_string_lossy()).map(Some);
        }
        let path = folder.join("tokenizer_config.json");
        let Some(config) = read(&path)? else { return Ok(None) };
        let wrong = |reason: String| ChatError::Parse { path: path.clone(), reason };
        let config: TokenizerConfig =
            serde_json::from_str(&config).map_err(|error| wrong(error.to_string()))?;
        let source = match config.chat_template {
            None => return Ok(None),
            Some(Templates::One(source)) => source,
            Some(Templates::Named(templates)) => {
                let default = templates.into_iter().find(|template| template.name == "default");
                default
                    .ok_or_else(|| wrong("none of the templates is named \"default\"".to_owned()))?
                    .template
            }
        };
        Self::new(&source, path.to_string_lossy()).map(Some)
    }

    /// From the metadata of the GGUF file at `path`; `None` if the model has no template.
    pub fn from_gguf(path: &Path, metadata: &Metadata) -> Result<Option<Self>, ChatError> {
        let source = metadata.string("tokenizer.chat_template");
        source.map(|source| Self::new(source, path.to_string_lossy())).transpose()
    }
}

fn read(path: &Path) -> Result<Option<String>, ChatError> {
    let wrong = |source| ChatError::Read { path: path.to_owned(), source };
    match std::fs::metadata(path) {
        Ok(found) if !found.is_file() => Err(ChatError::Parse {
            path: path.to_owned(),
            reason: "this is not a regular file".to_owned(),
        }),
        Ok(found) if found.len() > FILE_BYTES_MAX => Err(ChatError::Parse {
            path: path.to_owned(),
            reason: format!("the file is longer than {FILE_BYTES_MAX} bytes"),
        }),
        Ok(_) => std::fs::read_to_string(path).map(Some).map_err(wrong),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(wrong(error)),
    }
}
