//! The protocol's messages as they travel.

use crate::control::Control;
use crate::error::ClusterError;
use glinthawk_flight::{Buffer, ContextRow, Kind, Message, Row};
use glinthawk_protocol::{Attend, Attended, Home, Launch, Sample};

fn samples(launch: &Launch) -> Vec<u8> {
    let shared = launch.shared.iter().map(|row| (row.slot, row.position, row.page));
    let shared: Vec<(u32, u32, u32)> = shared.collect();
    postcard::to_stdvec(&(&launch.samples, shared)).expect("samples always encode")
}

fn row_of(row: &ContextRow) -> Row {
    Row { slot: row.slot(), position: row.position(), page: row.page(), token: 0 }
}

/// A launch, for slice 0.
pub(crate) fn launch(launch: &Launch) -> Message {
    Message::launch(launch.step, &launch.rows, &samples(launch))
}

/// A launch with its residual, for the next slice.
pub(crate) fn hop(launch: &Launch, residual: Buffer) -> Message {
    Message::hop(launch.step, &launch.rows, &samples(launch), residual)
}

/// Reads a launch or hop.
pub(crate) fn read_launch(message: &Message) -> Result<Launch, ClusterError> {
    let table = message.row_table();
    let (samples, shared): (Vec<Sample>, Vec<(u32, u32, u32)>) =
        postcard::from_bytes(table.sampling())
            .map_err(|error| ClusterError::Control(format!("samples of a launch: {error}")))?;
    let rows: Vec<Row> = table.rows().collect();
    if samples.iter().any(|sample| sample.row as usize >= rows.len()) {
        return Err(ClusterError::Control("a sample of a launch is beyond its rows".to_owned()));
    }
    let shared =
        shared.into_iter().map(|(slot, position, page)| Row { slot, position, page, token: 0 });
    Ok(Launch { step: message.step(), rows, shared: shared.collect(), samples })
}

/// Rows to attend, for a Tier-2 node.
pub(crate) fn attend(attend: &Attend, qkv: Buffer) -> Message {
    Message::attend(attend.step, attend.layer, &attend.rows, &attend.shared, qkv)
}

/// Reads rows to attend.
pub(crate) fn read_attend(message: &Message) -> Attend {
    let (rows, shared) = message.context_rows();
    let read = |rows: &[ContextRow]| rows.iter().map(row_of).collect();
    Attend { step: message.step(), layer: message.layer(), rows: read(rows), shared: read(shared) }
}

/// Attention output, for the Tier-1 node that asked.
pub(crate) fn attended(attended: &Attended, rows: usize, output: Buffer) -> Message {
    Message::attended(attended.step, attended.layer, rows, output)
}

/// Reads what an attention output belongs to.
pub(crate) fn read_attended(message: &Message) -> Attended {
    Attended { step: message.step(), layer: message.layer() }
}

/// Tokens, for the dispatcher.
pub(crate) fn home(home: &Home) -> Message {
    let tokens = postcard::to_stdvec(&home.tokens).expect("tokens always encode");
    Message::home(home.step, tokens)
}

/// Reads tokens.
pub(crate) fn read_home(message: &Message) -> Result<Home, ClusterError> {
    let tokens = postcard::from_bytes(message.table())
        .map_err(|error| ClusterError::Control(format!("tokens: {error}")))?;
    Ok(Home { step: message.step(), tokens })
}

/// Reads a message as whatever its kind says, for tests of what any bytes do; whether it could be read.
#[doc(hidden)]
pub fn read_any(message: &Message) -> bool {
    match message.kind() {
        Kind::Attend => !read_attend(message).rows.is_empty(),
        Kind::Attended => read_attended(message).step == message.step(),
        Kind::Hop | Kind::Launch => read_launch(message).is_ok(),
        Kind::Home => read_home(message).is_ok(),
        Kind::Control => Control::read(message).is_ok(),
        Kind::Heartbeat | Kind::Goodbye => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use glinthawk_protocol::{Generated, ShardId, StepId};

    #[test]
    fn every_message_carries_the_whole_epoch() {
        let step = StepId { shard: ShardId { flight: 2, lane: 3 }, epoch: (7 << 32) + 5 };
        let row = Row { slot: 1, position: 2, page: 3, token: 0 };
        let sent = Launch { step, rows: vec![row], shared: vec![row, row], samples: Vec::new() };
        assert_eq!(read_launch(&launch(&sent)).expect("a launch"), sent);
        assert_eq!(read_launch(&hop(&sent, Buffer::zeroed(4))).expect("a hop"), sent);
        let sent = Attend { step, layer: 4, rows: vec![row], shared: vec![row, row] };
        assert_eq!(read_attend(&attend(&sent, Buffer::zeroed(2))), sent);
        let sent = Attended { step, layer: 4 };
        assert_eq!(read_attended(&attended(&sent, 1, Buffer::zeroed(2))), sent);
        let token = Generated { token: 9, logprob: -0.5, alternatives: vec![(9, -0.5)] };
        let sent = Home { step, tokens: vec![token] };
        assert_eq!(read_home(&home(&sent)).expect("tokens"), sent);
    }
}
