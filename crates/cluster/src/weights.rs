//! Where a worker's weights come from: its own disk, or the dispatcher's; and how the dispatcher serves them.

use crate::control::Control;
use crate::error::ClusterError;
use crate::net::{Controller, Event, Peer};
use crate::station::Station;
use glinthawk_flight::{Buffer, Kind, Limits};
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
                Some(Event::Message { peer, message, received_at })
                    if peer == station.dispatcher && message.kind() == Kind::Control =>
                {
                    match Control::read(&message).map_err(|error| error.to_string())? {
                        Control::Fetched => return Ok(message.into_payload()),
                        Control::NotFetched(reason) => return Err(reason),
                        // It is about neighbours, who come later.
                        _ => station.keep(Event::Message { peer, message, received_at }),
                    }
                }
                Some(Event::Lost { peer, reason }) if peer == station.dispatcher => {
                    return Err(format!("the dispatcher is gone: {reason}"));
                }
                Some(event) => station.keep(event),
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

/// Sends a worker the part of a tensor it asked for. It asks again when it has that, so what waits for it is never more
/// than one answer, and sending does not wait.
pub(crate) fn serve_weights(
    controller: &Controller,
    model: &Model,
    peer: Peer,
    (tensor, rows): (Tensor, Option<(usize, usize)>),
) -> Result<(), ClusterError> {
    let pool = controller.pool();
    let bytes_max = Limits::default().payload_bytes_max as usize;
    if controller.queued_bytes(peer) > bytes_max {
        return Err(ClusterError::Control("weights were asked for and not read".to_owned()));
    }
    let read = match rows {
        Some((start, end)) => {
            let (outputs, inputs) = tensor.shape(model.config());
            let count = end.min(outputs).saturating_sub(start);
            let bytes = count * inputs * size_of::<bf16>();
            if bytes > bytes_max {
                let what = format!("{bytes} bytes of weights were asked for at once");
                return Err(ClusterError::Control(what));
            }
            let mut buffer = pool.take(bytes);
            model.read_rows(tensor, start..end, buffer.bf16_mut()).map(|()| buffer)
        }
        None => model.read_vector(tensor).map(|vector| {
            let mut buffer = pool.take(vector.len() * size_of::<f32>());
            buffer.f32_mut().copy_from_slice(&vector);
            buffer
        }),
    };
    let message = match read {
        Ok(buffer) => Control::Fetched.message(buffer),
        Err(error) => Control::NotFetched(error.to_string()).message(Buffer::default()),
    };
    Ok(controller.send(peer, message)?)
}
