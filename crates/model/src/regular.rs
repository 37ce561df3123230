//! Model files are regular files: a pipe or a device in a model's folder would be read forever, or never answer.

use std::fs::File;
use std::io;
use std::path::Path;

/// Opens a file, if it is one. The file is looked at first, since opening a pipe waits for whoever writes to it.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    let is_file = |is_file: bool| match is_file {
        true => Ok(()),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")),
    };
    is_file(std::fs::metadata(path)?.is_file())?;
    let file = File::open(path)?;
    // It may have been exchanged meanwhile.
    is_file(file.metadata()?.is_file())?;
    Ok(file)
}
