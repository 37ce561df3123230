//! The protocol's messages as they travel.

use crate::error::ClusterError;
use glinthawk_flight::{Buffer, Message, Place, Row, Shard};
use glinthawk_protocol::{Attend, Attended, Home, Launch, Sample, ShardId};

fn place(shard: ShardId, epoch: u32, layer: u32) -> Place {
    Place { flight: shard.flight, lane: shard.lane, epoch: epoch.into(), layer, ..Place::default() }
}

fn shard_of(place: &Place) -> ShardId {
    ShardId { flight: place.flight, lane: place.lane }
}

fn whole(launch: &Launch) -> [Shard; 1] {
    [Shard { lane: launch.shard.lane, start: 0, len: launch.rows.len() as u32 }]
}

fn samples(launch: &Launch) -> Vec<u8> {
    postcard::to_stdvec(&launch.samples).expect("samples always encode")
}

/// A launch, for slice 0.
pub(crate) fn launch(launch: &Launch) -> Message {
    let place = place(launch.shard, launch.epoch, 0);
    Message::launch(place, &launch.rows, &whole(launch), &samples(launch))
}

/// A launch with its residual, for the next slice.
pub(crate) fn hop(launch: &Launch, residual: Buffer) -> Message {
    let place = place(launch.shard, launch.epoch, 0);
    Message::hop(place, &launch.rows, &whole(launch), &samples(launch), residual)
}

/// Reads a launch or hop.
pub(crate) fn read_launch(message: &Message) -> Result<Launch, ClusterError> {
    let place = message.place();
    let table = message.row_table();
    let samples: Vec<Sample> = postcard::from_bytes(table.sampling())
        .map_err(|error| ClusterError::Control(format!("samples of a launch: {error}")))?;
    let rows: Vec<Row> = table.rows().collect();
    if samples.iter().any(|sample| sample.row as usize >= rows.len()) {
        return Err(ClusterError::Control("a sample of a launch is beyond its rows".to_owned()));
    }
    Ok(Launch { shard: shard_of(&place), epoch: place.epoch as u32, rows, samples })
}

/// Rows to attend, for a Tier-2 node.
pub(crate) fn attend(attend: &Attend, qkv: Buffer) -> Message {
    Message::attend(place(attend.shard, attend.epoch, attend.layer), &attend.rows, qkv)
}

/// Reads rows to attend.
pub(crate) fn read_attend(message: &Message) -> Attend {
    let place = message.place();
    let rows = message.context_rows().iter().map(|row| Row {
        slot: row.slot(),
        position: row.position(),
        page: row.page(),
        token: 0,
    });
    Attend {
        shard: shard_of(&place),
        epoch: place.epoch as u32,
        layer: place.layer,
        rows: rows.collect(),
    }
}

/// Attention output, for the Tier-1 node that asked.
pub(crate) fn attended(attended: &Attended, rows: usize, output: Buffer) -> Message {
    Message::attended(place(attended.shard, attended.epoch, attended.layer), rows, output)
}

/// Reads an attention output's place.
pub(crate) fn read_attended(message: &Message) -> Attended {
    let place = message.place();
    Attended { shard: shard_of(&place), epoch: place.epoch as u32, layer: place.layer }
}

/// Tokens, for the dispatcher.
pub(crate) fn home(home: &Home) -> Message {
    let bytes = postcard::to_stdvec(home).expect("tokens always encode");
    Message::home(place(home.shard, home.epoch, 0), bytes)
}

/// Reads tokens.
pub(crate) fn read_home(message: &Message) -> Result<Home, ClusterError> {
    postcard::from_bytes(message.table())
        .map_err(|error| ClusterError::Control(format!("tokens: {error}")))
}
