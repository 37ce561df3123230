//! A job that is ready to start: its output is locked and read, and nothing has been changed yet.

use crate::collision::refuse_collisions;
use crate::earlier::{self, Earlier, JobStanding};
use crate::error::JobError;
use crate::file_use::FileUse;
use crate::input::OpenInput;
use crate::job::{Job, JobOptions};
use crate::output::{Output, PreparedOutput};
use crate::served::ServedModel;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

/// A job that has changed nothing so far. If it is dropped, nothing has happened.
pub struct PreparedJob {
    input: OpenInput,
    model: Option<Arc<ServedModel>>,
    output: PreparedOutput,
    earlier: Earlier,
    standing: Option<JobStanding>,
}

impl PreparedJob {
    /// Opens the output and finds what is done already. Fails if the output holds results that
    /// match no line of the input, unless the options say what to do with them. If `model` is not
    /// known yet, `start` does that.
    pub fn new(
        input: OpenInput,
        options: &JobOptions,
        model: Option<Arc<ServedModel>>,
    ) -> Result<Self, JobError> {
        if let (Some(from), Output::File(to)) = (&input.path, &options.output) {
            let input = FileUse { role: "the input", path: from.clone(), written: false };
            let output = FileUse { role: "the output", path: to.clone(), written: true };
            refuse_collisions(&[input, output])?;
        }
        let earlier = options.earlier;
        let output = PreparedOutput::open(&options.output, earlier == Earlier::Overwrite)?;
        let mut prepared = Self { input, model: None, output, earlier, standing: None };
        if let Some(model) = model {
            prepared.compare(model)?;
        }
        Ok(prepared)
    }

    /// Results go to a stream; there are none from before. `name` is for messages.
    pub fn to_stream(
        input: OpenInput,
        name: impl Into<PathBuf>,
        stream: impl Write + Send + 'static,
    ) -> Self {
        let output = PreparedOutput::Stream { stream: Box::new(stream), path: name.into() };
        Self { input, model: None, output, earlier: Earlier::Continue, standing: None }
    }

    /// How much of the input is done; unknown if nothing is, or if the input is a stream.
    pub fn standing(&self) -> Option<JobStanding> {
        self.standing
    }

    /// Repairs or empties the output, and starts to read. `model` is the one that will answer: if a
    /// cluster has settled on an unexpected instruction set, results are compared again before
    /// anything changes.
    pub fn start(mut self, model: Arc<ServedModel>) -> Result<Job, JobError> {
        let known = self.model.as_ref().map(|known| known.run_digest());
        if known != Some(model.run_digest()) {
            self.compare(Arc::clone(&model))?;
        }
        if self.earlier == Earlier::Overwrite {
            self.look_before_emptying()?;
        }
        let (writer, results) = self.output.start()?;
        Job::start(self.input, model, writer, results, self.earlier)
    }

    /// Fails if the input has nothing to put in the place of earlier results, such as a stream whose
    /// producer failed. Waits for a stream's first bytes.
    fn look_before_emptying(&mut self) -> Result<(), JobError> {
        self.input.sniff()?;
        match &self.output {
            PreparedOutput::File { journal, .. } if self.input.is_at_end()? => {
                let (input, path) = (self.input.name.clone(), journal.path.clone());
                Err(JobError::NothingToOverwriteWith { input, path })
            }
            _ => Ok(()),
        }
    }

    fn compare(&mut self, model: Arc<ServedModel>) -> Result<(), JobError> {
        if let PreparedOutput::File { journal, results, .. } = &self.output
            && results.len() > 0
            && self.input.bytes().is_some()
        {
            let (input, earlier) = (&mut self.input, self.earlier);
            self.standing = Some(earlier::compare(input, &model, journal, results, earlier)?);
        }
        self.model = Some(model);
        Ok(())
    }
}
