//! Requests read and refused; the shape of whole and streamed answers.

use axum::http::StatusCode;
use serde_json::{Value, json};

use super::*;

fn chat(extra: Value) -> Result<ChatRequest, ApiError> {
    let mut body = json!({"model": "pirate", "messages": [{"role": "user", "content": "Hi"}]});
    for (name, value) in extra.as_object().expect("object") {
        body[name] = value.clone();
    }
    ChatRequest::parse(body.to_string().as_bytes())
}

fn completion(body: Value) -> Result<CompletionRequest, ApiError> {
    CompletionRequest::parse(body.to_string().as_bytes())
}

fn refused(result: Result<ChatRequest, ApiError>) -> ApiError {
    let error = result.expect_err("a refusal");
    assert_eq!(error.status, StatusCode::BAD_REQUEST);
    error
}

#[test]
fn a_chat_is_read() {
    let request = chat(json!({
        "temperature": 0.5, "top_p": 0.9, "top_k": -1, "seed": -1, "stop": "x", "stream": true,
        "max_completion_tokens": 7, "stream_options": {"include_usage": true}, "user": "me",
    }))
    .expect("a good request");
    assert_eq!(request.shared.model.as_deref(), Some("pirate"));
    assert!(request.shared.stream && request.shared.include_usage);
    assert_eq!(
        request.shared.sampling,
        Sampling {
            max_tokens: Some(7),
            temperature: Some(0.5),
            top_p: Some(0.9),
            top_k: Some(0),
            seed: Some(u64::MAX),
            stop: vec!["x".to_owned()],
            ..Sampling::default()
        }
    );
    assert_eq!(request.messages, json!([{"role": "user", "content": "Hi"}]));
}

#[test]
fn content_parts_are_joined_and_other_parts_refused() {
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    let request = chat(json!({"messages": [{"role": "user", "content": parts}]})).expect("good");
    assert_eq!(request.messages[0]["content"], "a\nb");
    let image = json!([{"type": "image_url", "image_url": {"url": "x"}}]);
    let error = refused(chat(json!({"messages": [{"role": "user", "content": image}]})));
    assert_eq!(error.param.as_deref(), Some("messages[0].content[0].type"));
}

#[test]
fn what_would_change_the_answer_is_refused_by_name() {
    for (name, value) in [
        ("tools", json!([{"type": "function"}])),
        ("tool_choice", json!("auto")),
        ("functions", json!([{}])),
        ("response_format", json!({"type": "json_object"})),
        ("audio", json!({})),
        ("reasoning_effort", json!("high")),
        ("chat_template_kwargs", json!({"a": 1})),
    ] {
        let error = refused(chat(json!({name: value})));
        assert_eq!(error.param.as_deref(), Some(name));
        assert!(error.message.contains(name), "{}", error.message);
        assert_eq!(error.code, Some("unsupported_parameter"));
    }
    for (name, value) in [("suffix", json!("x")), ("best_of", json!(2))] {
        let error = completion(json!({"prompt": "a", name: value})).expect_err("a refusal");
        assert_eq!(error.param.as_deref(), Some(name));
    }
}

#[test]
fn values_that_change_nothing_are_taken() {
    chat(json!({
        "n": 1, "logprobs": false, "tools": [], "tool_choice": "none", "min_p": 0,
        "response_format": {"type": "text"}, "logit_bias": {}, "presence_penalty": 0,
        "frequency_penalty": 0.0, "modalities": ["text"], "top_logprobs": null, "store": false,
        "service_tier": "auto", "metadata": {"a": "b"},
    }))
    .expect("nothing here changes an answer");
}

#[test]
fn what_shapes_the_draw_is_read() {
    let request = chat(json!({
        "n": 3, "best_of": 3, "min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": -2,
        "frequency_penalty": 0.5, "logit_bias": {"7": -100, "8": 0.5}, "logprobs": true,
        "top_logprobs": 2, "prompt_logprobs": 0,
    }))
    .expect("a good request");
    let expected = Sampling {
        n: Some(3),
        min_p: Some(0.25),
        repetition_penalty: Some(1.5),
        presence_penalty: Some(-2.0),
        frequency_penalty: Some(0.5),
        logit_bias: vec![(7, -100.0), (8, 0.5)],
        logprobs: Some(2),
        prompt_logprobs: Some(0),
        ..Sampling::default()
    };
    assert_eq!(request.shared.sampling, expected);
    let plain = chat(json!({"logprobs": true})).expect("good");
    assert_eq!(plain.shared.sampling.logprobs, Some(0));
}

#[test]
fn a_completion_may_score_its_prompt_alone() {
    let request = completion(json!({"prompt": "a", "echo": true, "logprobs": 1, "max_tokens": 0}))
        .expect("good");
    assert!(request.echo);
    let sampling = &request.shared.sampling;
    assert_eq!((sampling.max_tokens, sampling.logprobs), (Some(0), Some(1)));
    for (body, param) in [
        (json!({"prompt": "a", "echo": true, "logprobs": 1, "stream": true}), "echo"),
        (json!({"prompt": "a", "prompt_logprobs": 1, "stream": true}), "prompt_logprobs"),
    ] {
        let error = completion(body).expect_err("a refusal");
        assert_eq!(error.param.as_deref(), Some(param));
    }
}

#[test]
fn unknown_fields_are_refused_by_name() {
    let error = refused(chat(json!({"temprature": 1})));
    assert_eq!(
        (error.param.as_deref(), error.code),
        (Some("temprature"), Some("unknown_parameter"))
    );
    let error = refused(chat(json!({"stream_options": {"x": 1}})));
    assert_eq!(error.param.as_deref(), Some("stream_options.x"));
    let error = refused(chat(json!({"messages": [{"role": "user", "content": "a", "x": 1}]})));
    assert_eq!(error.param.as_deref(), Some("messages[0].x"));
}

#[test]
fn wrong_values_are_refused_by_name() {
    for (name, value) in [
        ("temperature", json!(-0.1)),
        ("temperature", json!("hot")),
        ("top_p", json!(0)),
        ("top_p", json!(1e-60)),
        ("top_p", json!(1.1)),
        ("top_k", json!(-2)),
        ("max_tokens", json!(0)),
        ("max_tokens", json!(1.5)),
        ("seed", json!("x")),
        ("stop", json!(["a", "b", "c", "d", "e"])),
        ("stop", json!("")),
        ("stop", json!([1])),
        ("stream", json!(1)),
        ("model", json!(5)),
        ("messages", json!([])),
        ("messages", json!("hi")),
        ("stop_token_ids", json!([-1])),
        ("n", json!(0)),
        ("n", json!(1000)),
        ("min_p", json!(1.5)),
        ("repetition_penalty", json!(0)),
        ("presence_penalty", json!(2.5)),
        ("frequency_penalty", json!("x")),
        ("logit_bias", json!([1])),
        ("logit_bias", json!({"x": 1})),
        ("logit_bias", json!({"1": 101})),
        ("logit_bias", json!({"7": 1, "07": 2})),
        ("logprobs", json!(1)),
        ("top_logprobs", json!(21)),
        ("top_logprobs", json!(1)),
        ("prompt_logprobs", json!(-1)),
        ("best_of", json!(2)),
    ] {
        assert_eq!(refused(chat(json!({name: value}))).param.as_deref(), Some(name), "{value}");
    }
    let both = refused(chat(json!({"max_tokens": 1, "max_completion_tokens": 2})));
    assert_eq!(both.param.as_deref(), Some("max_tokens"));
    for body in ["", "[]", "{", "null"] {
        assert_eq!(refused(ChatRequest::parse(body.as_bytes())).param, None);
    }
}

#[test]
fn prompts_come_in_four_forms() {
    let prompts =
        |prompt: Value| completion(json!({"prompt": prompt})).map(|request| request.prompts);
    let text = |text: &str| Prompt::Text(text.to_owned());
    assert_eq!(prompts(json!("a")), Ok(vec![text("a")]));
    assert_eq!(prompts(json!(["a", "b"])), Ok(vec![text("a"), text("b")]));
    assert_eq!(prompts(json!([1, 2])), Ok(vec![Prompt::Tokens(vec![1, 2])]));
    let lists = Ok(vec![Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2])]);
    assert_eq!(prompts(json!([[1], [2]])), lists);
    for bad in [json!([]), json!([[]]), json!([1, -2]), json!({}), json!([1, "a"])] {
        let error = prompts(bad).expect_err("a refusal");
        assert_eq!(error.param.as_deref(), Some("prompt"));
    }
}

#[test]
fn errors_have_openai_s_shape() {
    let error = ApiError::unknown_model("ghost");
    assert_eq!(error.status, StatusCode::NOT_FOUND);
    let body = error.body();
    assert_eq!(body["error"]["code"], "model_not_found");
    assert_eq!(body["error"]["param"], "model");
    assert_eq!(body["error"]["type"], "invalid_request_error");
    assert!(body["error"]["message"].as_str().expect("text").contains("ghost"));
}

fn chunks(kind: Kind, include_usage: bool) -> Vec<Value> {
    let envelope = Envelope { kind, id: "id-1".to_owned(), created: 5, model: "pirate".to_owned() };
    let mut chunks = Chunks { envelope, include_usage, offsets: vec![0] };
    let mut out = chunks.role(0).unwrap_or_default();
    out.push_str(&chunks.text(0, "Arr\n", None));
    out.push_str(&chunks.finish(0, "stop"));
    out.push_str(&chunks.end(Usage { prompt_tokens: 3, completion_tokens: 2, cached_tokens: 1 }));
    let mut lines: Vec<&str> = out.split_terminator("\n\n").collect();
    assert_eq!(lines.pop(), Some("data: [DONE]"));
    lines
        .into_iter()
        .map(|line| serde_json::from_str(line.strip_prefix("data: ").expect("data")).expect("json"))
        .collect()
}

#[test]
fn a_streamed_chat_follows_the_rules() {
    let parts = chunks(Kind::Chat, true);
    assert_eq!(parts.len(), 4);
    for part in &parts {
        assert_eq!(
            (&part["id"], &part["created"], &part["model"]),
            (&json!("id-1"), &json!(5), &json!("pirate"))
        );
        assert_eq!(part["object"], "chat.completion.chunk");
    }
    assert_eq!(parts[0]["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(parts[1]["choices"][0]["delta"], json!({"content": "Arr\n"}));
    assert_eq!(parts[1]["choices"][0]["finish_reason"], Value::Null);
    assert_eq!(parts[2]["choices"][0]["delta"], json!({}));
    assert_eq!(parts[2]["choices"][0]["finish_reason"], "stop");
    assert!(parts[..3].iter().all(|part| part["usage"].is_null() && part.get("usage").is_some()));
    assert_eq!(parts[3]["choices"], json!([]));
    assert_eq!(parts[3]["usage"]["total_tokens"], 5);
    let plain = chunks(Kind::Chat, false);
    assert_eq!(plain.len(), 3);
    assert!(plain.iter().all(|part| part.get("usage").is_none()));
}

#[test]
fn a_streamed_completion_follows_the_rules() {
    let parts = chunks(Kind::Completion, false);
    assert_eq!(parts.len(), 2);
    assert_eq!(parts[0]["choices"][0]["text"], "Arr\n");
    assert_eq!(parts[1]["choices"][0]["text"], "");
    assert_eq!(parts[1]["choices"][0]["finish_reason"], "stop");
}
