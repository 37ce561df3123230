//! `generate`: one prompt, streamed.

use crate::args::GenerateArgs;
use crate::progress::{say, with_bars};
use crate::{interrupt, units};
use anyhow::anyhow;
use glinthawk_cluster::{Crowd, EngineEvent};
use glinthawk_jobs::Generation;
use glinthawk_launch::{Opened, Resolved, launch};
use serde_json::{Value, json};
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Completes one prompt on standard output.
pub fn generate(args: &GenerateArgs) -> anyhow::Result<ExitCode> {
    let specification = args.engine.specification();
    let opened = with_bars(|tell| Opened::open(&specification, tell))?;
    let chat = !args.raw && opened.served.template.is_some();
    let mut generation = Generation::new(Arc::clone(&opened.served), &body(args, chat))
        .map_err(|refusal| anyhow!("{refusal}"))?;
    let resolved = Resolved::new(&specification, &opened, Crowd::ONE)?;
    let never = AtomicBool::new(false);
    let mut engine = with_bars(|tell| launch(&opened, &resolved, &never, tell))?.engine;
    let interrupted = interrupt::flag()?;
    let mut out = std::io::stdout().lock();
    engine.submit(generation.prompt())?;
    while !interrupted.load(Ordering::Relaxed) {
        for event in engine.advance()? {
            match event {
                EngineEvent::Token(id, generated) => {
                    let piece = generation.token(&generated);
                    out.write_all(piece.text.as_bytes())?;
                    out.flush()?;
                    if let Some(kept) = piece.stop {
                        engine.stop(id, kept as usize);
                    }
                }
                EngineEvent::Finished(completion) => {
                    let ending = generation.finish(&completion).map_err(|reason| {
                        let _ = writeln!(out, "{}", generation.held());
                        anyhow!("{reason}")
                    })?;
                    writeln!(out, "{}", ending.text)?;
                    say(format_args!(
                        "[{} prompt and {} generated tokens in {}, ended by {}]",
                        ending.prompt_tokens,
                        ending.completion_tokens,
                        units::seconds(engine.wall_s()),
                        ending.finish_reason,
                    ));
                    return Ok(ExitCode::SUCCESS);
                }
            }
        }
    }
    writeln!(out)?;
    Ok(ExitCode::FAILURE)
}

fn body(args: &GenerateArgs, chat: bool) -> Value {
    let mut body = json!({
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "seed": args.seed,
    });
    if chat {
        body["messages"] = json!([{"role": "user", "content": args.text}]);
    } else {
        body["prompt"] = json!(args.text);
    }
    body
}
