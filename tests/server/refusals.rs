//! Requests that cannot be answered as asked: a clear error that names the field, and a server that
//! goes on.

use serde_json::{Value, json};

use crate::binary::Server;
use crate::http::{Client, Reply};
use crate::questions::{BASE, CHAT, COMPLETIONS, SENTENCE, ask, chat};

fn client() -> Client {
    Client::connect(Server::shared().address)
}

fn completion() -> Value {
    json!({"model": BASE, "prompt": "On Friday,", "temperature": 0, "max_tokens": 4})
}

/// OpenAI's error object, with a message that is no dump of internals.
fn error(reply: &Reply, status: u16) -> Value {
    assert_eq!(reply.status, status, "{reply:?}");
    assert_eq!(reply.header("content-type"), Some("application/json"), "{reply:?}");
    let error = reply.json()["error"].clone();
    let keys: Vec<&String> = error.as_object().expect("an error object").keys().collect();
    assert_eq!(keys, ["message", "type", "param", "code"], "{reply:?}");
    assert!(error["message"].as_str().is_some_and(|text| text.len() > 5), "{reply:?}");
    error
}

/// 400, and both the message and `param` name the field.
fn assert_named(reply: &Reply, field: &str) {
    let error = error(reply, 400);
    assert_eq!(error["param"], field, "{reply:?}");
    assert!(error["message"].as_str().unwrap().contains(field), "{reply:?}");
    assert_eq!(error["type"], "invalid_request_error");
}

fn assert_alive() {
    let answer = ask(&mut client(), &chat("math", "Rosa had 6 birds and lost 2 of them."));
    assert_eq!(answer.reason, "stop");
    let errors = Server::shared().errors();
    assert!(!errors.contains("panicked"), "{errors}");
}

/// A field and a value of it.
type Fields = [(&'static str, Value)];

/// Sound requests, and the fields of each that a test then spoils: those that both kinds have, and its own.
fn requests<'a>(
    both: &'a Fields,
    chats: &'a Fields,
    completions: &'a Fields,
) -> [(&'static str, Value, &'a Fields); 4] {
    [
        (CHAT, chat("pirate", SENTENCE), both),
        (CHAT, chat("pirate", SENTENCE), chats),
        (COMPLETIONS, completion(), both),
        (COMPLETIONS, completion(), completions),
    ]
}

/// What would change the answer and is not built.
#[test]
fn a_parameter_that_is_not_built_is_refused_by_name() {
    let both = [
        ("best_of", json!(2)),
        ("min_tokens", json!(3)),
        ("response_format", json!({"type": "json_object"})),
        ("guided_json", json!({"type": "object"})),
        ("skip_special_tokens", json!(false)),
        ("include_stop_str_in_output", json!(true)),
        ("temprature", json!(0.5)),
    ];
    let chats = [
        ("tools", json!([{"type": "function", "function": {"name": "f"}}])),
        ("tool_choice", json!("required")),
        ("functions", json!([{"name": "f"}])),
        ("function_call", json!("auto")),
        ("audio", json!({"voice": "x", "format": "wav"})),
        ("modalities", json!(["text", "audio"])),
        ("reasoning_effort", json!("high")),
        ("chat_template", json!("{{ messages }}")),
        ("chat_template_kwargs", json!({"thinking": true})),
        ("continue_final_message", json!(true)),
        ("add_generation_prompt", json!(false)),
        ("prompt", json!("x")),
    ];
    let completions = [("suffix", json!("end")), ("messages", json!([]))];
    let mut client = client();
    for (path, body, table) in requests(&both, &chats, &completions) {
        for (field, value) in table {
            let mut body = body.clone();
            body[*field] = value.clone();
            assert_named(&client.post(path, &body), field);
        }
    }
    assert_alive();
}

#[test]
fn a_value_that_changes_nothing_is_accepted() {
    let neutral = json!({
        "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {},
        "response_format": {"type": "text"}, "logprobs": false, "tools": [], "stop": null,
        "user": "u", "metadata": {"a": "b"}, "seed": 3, "stream": false, "top_p": 1, "top_k": -1,
        "stream_options": null, "store": false, "max_tokens": null,
    });
    let mut body =
        chat("math", "Rosa had 6 birds and lost 2 of them. How many birds are there now?");
    body.as_object_mut().unwrap().extend(neutral.as_object().unwrap().clone());
    assert_eq!(ask(&mut client(), &body).text, "6 - 2 = 4");
}

#[test]
fn a_value_of_the_wrong_kind_or_range_is_refused_by_name() {
    let both = [
        ("model", json!(5)),
        ("temperature", json!("hot")),
        ("temperature", json!(-0.1)),
        ("temperature", json!(2.5)),
        ("top_p", json!(0)),
        ("top_p", json!(1.5)),
        ("top_k", json!(-2)),
        ("top_k", json!(1.5)),
        ("seed", json!(1.5)),
        ("seed", json!("x")),
        ("max_tokens", json!(-1)),
        ("max_tokens", json!(2.5)),
        ("max_tokens", json!("5")),
        ("max_tokens", json!(1e30)),
        ("stream", json!("yes")),
        ("stream_options", json!(true)),
        ("stream_options.include_usage", json!(1)),
        ("stop", json!([1])),
        ("stop", json!("")),
        ("stop", json!(["1", "2", "3", "4", "5"])),
        ("stop_token_ids", json!("x")),
        ("stop_token_ids", json!([-1])),
        ("ignore_eos", json!(1)),
        ("n", json!(0)),
        ("n", json!(129)),
        ("n", json!(1.5)),
        ("logit_bias", json!({"50": -101})),
        ("logit_bias", json!({"fifty": 1})),
        ("logit_bias", json!({"2048": 1})),
        ("logit_bias", json!({"5": 1, "05": 1})),
        ("presence_penalty", json!(2.1)),
        ("frequency_penalty", json!("x")),
        ("repetition_penalty", json!(0)),
        ("min_p", json!(-0.1)),
        ("prompt_logprobs", json!(21)),
    ];
    let chats = [
        ("max_tokens", json!(0)),
        ("logprobs", json!(1)),
        ("top_logprobs", json!(21)),
        ("top_logprobs", json!(3)), // without 'logprobs': true
        ("messages", json!("hi")),
        ("messages", json!([])),
        ("messages", Value::Null),
        ("messages[0]", json!(["hi"])),
        ("messages[0].role", json!([{"content": "x"}])),
        ("messages[0].role", json!([{"role": 1, "content": "x"}])),
        ("messages[0].content", json!([{"role": "user"}])),
        ("messages[0].content", json!([{"role": "user", "content": 7}])),
        (
            "messages[0].content[0].type",
            json!([{"role": "user", "content": [{"type": "image_url"}]}]),
        ),
        (
            "messages[1].tool_calls",
            json!([{"role": "user", "content": "x"},
            {"role": "assistant", "content": "y", "tool_calls": [{}]}]),
        ),
    ];
    let completions = [
        ("prompt", Value::Null),
        ("prompt", json!([])),
        ("prompt", json!(7)),
        ("prompt", json!([[]])),
        ("prompt", json!([-1])),
        ("prompt", json!([1, "a"])),
        ("prompt", json!([1.5])),
        ("prompt", json!({"text": "x"})),
        ("prompt", json!("")),
    ];
    let mut client = client();
    for (path, body, table) in requests(&both, &chats, &completions) {
        for (field, value) in table {
            let mut body = body.clone();
            match field.split_once('.') {
                Some(("stream_options", inner)) => body["stream_options"] = json!({inner: value}),
                _ => body[field.split(['[', '.']).next().unwrap()] = value.clone(),
            }
            let reply = client.post(path, &body);
            let error = error(&reply, 400);
            let param = error["param"].as_str().unwrap_or_else(|| panic!("{field}: {reply:?}"));
            assert!(field.ends_with(param), "{field} = {value}: {reply:?}");
            assert!(error["message"].as_str().unwrap().contains(param), "{reply:?}");
        }
    }
    assert_alive();
}

#[test]
fn a_token_outside_the_vocabulary_is_refused() {
    let mut body = completion();
    body["prompt"] = json!([1, 2048]);
    let reply = client().post(COMPLETIONS, &body);
    assert_named(&reply, "prompt");
    assert!(reply.body.contains("2048"), "{reply:?}");
    assert_alive();
}

#[test]
fn what_does_not_fit_the_context_is_refused_with_the_limit() {
    let long = "blue boats ".repeat(3000);
    let mut capped = completion();
    capped["max_tokens"] = json!(2048);
    let mut tokens = completion();
    tokens["prompt"] = json!(vec![300; 2048]);
    let mut stream = chat("pirate", &long);
    stream["stream"] = json!(true);
    let mut client = client();
    for (path, body, param) in [
        (CHAT, chat("pirate", &long), "messages"),
        (CHAT, stream, "messages"),
        (COMPLETIONS, capped, "max_tokens"),
        (COMPLETIONS, tokens, "prompt"),
    ] {
        let reply = client.post(path, &body);
        let error = error(&reply, 400);
        assert_eq!(error["param"], param, "{reply:?}");
        assert_eq!(error["code"], "context_length_exceeded");
        assert!(error["message"].as_str().unwrap().contains("2048"), "{reply:?}");
    }
    assert_alive();
}

/// The longest prompt that fits still has room for one token.
#[test]
fn a_prompt_of_the_whole_context_but_one_token_is_answered() {
    let body =
        json!({"model": BASE, "prompt": vec![300; 2047], "temperature": 0, "ignore_eos": true});
    let reply = client().post(COMPLETIONS, &body).ok();
    assert_eq!(reply["usage"]["total_tokens"], 2048);
    assert_eq!(reply["choices"][0]["finish_reason"], "length");
}

#[test]
fn what_is_no_json_object_is_refused_and_says_why() {
    let deep = "[".repeat(200_000);
    let mut client = client();
    for path in [CHAT, COMPLETIONS] {
        for body in [
            &b""[..],
            b"{\"model\": ",
            b"{\"model\": \"pirate\",}",
            b"[]",
            b"\"text\"",
            b"nonsense",
            b"{\"temperature\": NaN}",
            b"{\"temperature\": 1e999}",
            b"{\"model\": \"\xff\xfe\"}",
            b"{\"model\": \"\\ud800\"}",
            deep.as_bytes(),
        ] {
            let error = error(&client.post_bytes(path, body), 400);
            assert!(error["message"].as_str().unwrap().contains("JSON"), "{error}");
        }
    }
    assert_alive();
}

#[test]
fn a_body_past_the_limit_is_413() {
    // One byte too many: the server has read all of it when it refuses, so its reply is not lost.
    let mut client = client();
    error(&client.post_bytes(CHAT, &vec![b' '; (32 << 20) + 1]), 413);
    assert_alive();
}

#[test]
fn unknown_routes_are_404_and_wrong_methods_405() {
    let mut client = client();
    for (method, path, status) in [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/chat/completions/", 404),
        ("GET", "/v1/%ff%fe", 404),
        ("GET", "/v1/models/%ff", 400),
        ("GET", CHAT, 405),
        ("PUT", COMPLETIONS, 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/health", 405),
    ] {
        client.send(method, path, b"");
        let reply = client.reply().expect("a reply");
        error(&reply, status);
        assert!(status != 405 || reply.header("allow").is_some(), "{reply:?}");
    }
    assert_alive();
}

#[test]
fn what_is_no_http_harms_nobody() {
    for bytes in [&b"\x16\x03\x01\x02\x00\x01\x00"[..], b"\r\n\r\n\r\n", b"GET\r\n\r\n", &[0; 4096]]
    {
        let mut client = client();
        client.send_raw(bytes);
        client.send_raw(b"\r\n\r\n");
        client.end();
        if let Some(reply) = client.reply() {
            assert_eq!(reply.status, 400, "{reply:?}");
        }
    }
    // A client that promises a body and leaves.
    let mut client = client();
    client
        .send_raw(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{\"mod");
    drop(client);
    assert_alive();
}

/// Text far beyond the context is refused by its length: encoding it first took gigabytes and held up
/// every other connection for seconds.
#[test]
fn a_text_far_beyond_the_context_is_refused_unread() {
    let text = "a".repeat(30 << 20);
    // What any body of this size takes: it is sent and parsed before the field is found unknown.
    let timed = |route: &str, body: &Value| {
        let began = std::time::Instant::now();
        let refusal = error(&client().post(route, body), 400);
        (refusal, began.elapsed())
    };
    let (refusal, unknown) = timed(COMPLETIONS, &json!({"model": BASE, "prompt": "a", "x": text}));
    assert_eq!(refusal["param"], "x");
    let plain = json!({"model": BASE, "prompt": text});
    let talk = json!({"model": BASE, "messages": [{"role": "user", "content": text}]});
    for (route, body, field) in [(COMPLETIONS, plain, "prompt"), (CHAT, talk, "messages")] {
        let (refusal, took) = timed(route, &body);
        assert_eq!(
            (&refusal["code"], &refusal["param"]),
            (&json!("context_length_exceeded"), &json!(field))
        );
        // Encoding it takes some hundred times as long.
        assert!(took < 10 * unknown, "{field}: {took:?}, an unknown field {unknown:?}");
    }
    assert_alive();
}
