//! Bodies of requests, arbitrary bytes, as a chat and as a completion: refused with a status of the
//! client's and an error object, or a request whose sampling is in range.
#![no_main]

use libfuzzer_sys::fuzz_target;
use openai::{ApiError, ChatRequest, CompletionRequest, Prompt, Shared};

// The server is a binary, so its request types are compiled in here; replies are not used.
#[allow(dead_code, unused_imports)]
#[path = "../../server/src/openai/mod.rs"]
mod openai;

fuzz_target!(|data: &[u8]| {
    match ChatRequest::parse(data) {
        Ok(chat) => {
            check_shared(&chat.shared);
            assert!(chat.shared.sampling.max_tokens.is_none_or(|tokens| tokens > 0));
            let messages = chat.messages.as_array().expect("a list of messages");
            assert!(!messages.is_empty());
            assert!(messages.iter().all(|m| m["role"].is_string() && m["content"].is_string()));
        }
        Err(error) => check_error(&error),
    }
    match CompletionRequest::parse(data) {
        Ok(completion) => {
            // Of no tokens too: that is how a prompt alone is scored.
            check_shared(&completion.shared);
            assert!(!completion.prompts.is_empty());
            let empty = |prompt: &Prompt| matches!(prompt, Prompt::Tokens(ids) if ids.is_empty());
            assert!(!completion.prompts.iter().any(empty));
        }
        Err(error) => check_error(&error),
    }
});

fn check_shared(shared: &Shared) {
    let sampling = &shared.sampling;
    assert!(sampling.temperature.is_none_or(|t| (0.0..=2.0).contains(&t)));
    assert!(sampling.top_p.is_none_or(|p| p > 0.0 && p <= 1.0), "{:?}", sampling.top_p);
    assert!(sampling.stop.len() <= 4 && sampling.stop.iter().all(|stop| !stop.is_empty()));
    assert!(shared.model.as_ref().is_none_or(|name| !name.is_empty()));
}

fn check_error(error: &ApiError) {
    assert!(error.status.is_client_error());
    assert!(!error.message.is_empty());
}
