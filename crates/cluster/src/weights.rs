//! Where a worker's weights come from: its own disk, or the dispatcher's.

use crate::control::Control;
use crate::error::ClusterError;
use crate::net::Event;
use crate::station::Station;
use glinthawk_flight::{Buffer, Kind};
use glinthawk_model::{ElsewhereWeights, Model, ModelIdentity, Tensor, catalogue};
use half::bf16;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The model of a worker's role: from its own disk if the same model is there, else streamed.
pub(crate) fn model_of(station: &Arc<Station>) -> Result<Model, ClusterError> {
    let role = &station.role;
    let here = catalogue::resolve_here(&role.model).and_then(|resolved| resolved.open().ok());
    // Every byte counts: a file that differs in a few of them would give other results.
    let is_same = |model: &Model| ModelIdentity::of_weights(model, &mut |_, _| ()) == role.identity;
    if let Some(model) = here.filter(is_same) {
        tracing::info!(model = role.model, "weights come from this disk");
        return Ok(model);
    }
    tracing::info!(
        model = role.model,
        "not on this disk, or another one: weights come from the dispatcher"
    );
    let weights = DispatcherWeights { station: Arc::clone(station), asking: Mutex::new(()) };
    Ok(Model::elsewhere(role.model.clone(), role.config.clone(), Box::new(weights)))
}

/// Weights that the dispatcher reads for this worker: one question at a time.
struct DispatcherWeights {
    station: Arc<Station>,
    asking: Mutex<()>,
}

impl std::fmt::Debug for DispatcherWeights {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("DispatcherWeights")
    }
}

impl DispatcherWeights {
    fn ask(&self, tensor: Tensor, rows: Option<(usize, usize)>) -> Result<Buffer, String> {
        let _one_at_a_time = self.asking.lock().expect("no panic while asking");
        let station = &self.station;
        station
            .tell_dispatcher(&Control::Fetch { tensor, rows })
            .map_err(|error| error.to_string())?;
        loop {
            match station.controller.recv(Duration::from_secs(1)) {
                None => {}
                Some(Event::Message { peer, message, .. })
                    if peer == station.dispatcher && message.kind() == Kind::Control =>
                {
                    return match Control::read(&message).map_err(|error| error.to_string())? {
                        Control::Fetched => Ok(message.into_payload()),
                        Control::NotFetched(reason) => Err(reason),
                        other => Err(format!("the dispatcher answered {other:?}")),
                    };
                }
                Some(Event::Lost { peer, reason }) if peer == station.dispatcher => {
                    return Err(format!("the dispatcher is gone: {reason}"));
                }
                Some(event) => {
                    station.stash.lock().expect("no panic with the stash").push_back(event)
                }
            }
        }
    }
}

impl ElsewhereWeights for DispatcherWeights {
    fn read_rows(
        &self,
        tensor: Tensor,
        rows: Range<usize>,
        out: &mut [bf16],
    ) -> Result<(), String> {
        let buffer = self.ask(tensor, Some((rows.start, rows.end)))?;
        let values = buffer.bf16();
        if values.len() != out.len() {
            return Err(format!("{} values came where {} were asked for", values.len(), out.len()));
        }
        out.copy_from_slice(values);
        self.station.controller.pool().give(buffer);
        Ok(())
    }

    fn read_vector(&self, tensor: Tensor, length: usize) -> Result<Vec<f32>, String> {
        let buffer = self.ask(tensor, None)?;
        let values = buffer.f32();
        if values.len() != length {
            return Err(format!("{} values came where {length} were asked for", values.len()));
        }
        Ok(values.to_vec())
    }
}
