//! `tokenize`: what the model sees of a prompt. Loads no weights.

use crate::args::TokenizeArgs;
use crate::progress::with_bars;
use anyhow::Context;
use glinthawk_jobs::{Input, ServedModel, preview_input, preview_line};
use glinthawk_launch::open_text;
use serde_json::json;
use std::io::Write;
use std::process::ExitCode;

/// Prints the prompt's text, its tokens and their number.
pub fn tokenize(args: &TokenizeArgs) -> anyhow::Result<ExitCode> {
    let served = with_bars(|tell| open_text(&args.model, args.max_context, tell))?;
    let ids = match (&args.text, &args.request) {
        (_, Some(path)) => {
            let input = match path.to_str() {
                Some("-") => Input::Stdin,
                _ => Input::File(path.clone()),
            };
            preview_input(&served, &input, args.line)?
        }
        (text, None) => {
            let text = text.as_deref().context("give a text, or a line of a file by --request")?;
            let chat = !args.raw && served.template.is_some();
            let body = match chat {
                true => json!({"messages": [{"role": "user", "content": text}]}),
                false => json!({"prompt": text}),
            };
            preview_line(&served, 1, body.to_string().as_bytes())?
        }
    };
    match args.json {
        true => print_json(&served, &ids)?,
        false => print_table(&served, &ids)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn print_json(served: &ServedModel, ids: &[u32]) -> anyhow::Result<()> {
    let tokenizer = &served.tokenizer;
    let token = |&id: &u32| json!({"id": id, "piece": tokenizer.token_text(id), "special": tokenizer.is_special(id)});
    let tokens: Vec<_> = ids.iter().map(token).collect();
    let whole = json!({"text": tokenizer.decode(ids, false), "tokens": tokens, "count": ids.len()});
    writeln!(std::io::stdout(), "{whole}")?;
    Ok(())
}

fn print_table(served: &ServedModel, ids: &[u32]) -> anyhow::Result<()> {
    let tokenizer = &served.tokenizer;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}\n", tokenizer.decode(ids, false))?;
    for &id in ids {
        let mark = if tokenizer.is_special(id) { "  special" } else { "" };
        writeln!(out, "{id:>8}  {}{mark}", json!(tokenizer.token_text(id)))?;
    }
    let tokens = if ids.len() == 1 { "token" } else { "tokens" };
    writeln!(out, "\n{} {tokens}", ids.len())?;
    Ok(())
}
