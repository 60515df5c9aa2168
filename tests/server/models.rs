//! What can be asked, by name (C22): a reply named the base instead of the adapter, and nothing
//! listed what is loaded.

use serde_json::{Value, json};

use crate::binary::Server;
use crate::http::Client;
use crate::questions::{ADAPTERS, BASE, CHAT, COMPLETIONS, SENTENCE, chat};

fn shared() -> Client {
    Client::connect(Server::shared().address)
}

#[test]
fn the_list_has_the_base_and_its_adapters_with_their_parent() {
    let list = shared().get("/v1/models").ok();
    assert_eq!(list["object"], "list");
    let models = list["data"].as_array().unwrap();
    let ids: Vec<&str> = models.iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(ids[0], BASE);
    let mut adapters = ids[1..].to_vec();
    adapters.sort_unstable();
    let mut expected = ADAPTERS.to_vec();
    expected.sort_unstable();
    assert_eq!(adapters, expected);
    for (index, model) in models.iter().enumerate() {
        let parent = if index == 0 { Value::Null } else { json!(BASE) };
        assert_eq!(model["parent"], parent);
        assert_eq!(model["object"], "model");
        assert!(model["created"].as_u64().is_some_and(|created| created > 1_600_000_000));
        assert!(model["owned_by"].is_string());
        assert_eq!(model["max_model_len"], 2048);
    }
}

#[test]
fn a_model_is_retrieved_by_its_name_and_an_unknown_one_is_404() {
    let mut client = shared();
    let list = client.get("/v1/models").ok();
    for model in list["data"].as_array().unwrap() {
        let path = format!("/v1/models/{}", model["id"].as_str().unwrap());
        assert_eq!(client.get(&path).ok(), *model);
    }
    let reply = client.get("/v1/models/ghost");
    assert_eq!(reply.status, 404);
    assert_eq!(reply.json()["error"]["code"], "model_not_found");
}

#[test]
fn health_is_ok() {
    assert_eq!(shared().get("/health").ok()["status"], "ok");
}

#[test]
fn an_unknown_model_is_404_in_openai_s_shape_and_names_it() {
    for (path, body) in [
        (CHAT, chat("ghost", SENTENCE)),
        (COMPLETIONS, json!({"model": "ghost", "prompt": "x"})),
        // Names are exact.
        (CHAT, chat("Pirate", SENTENCE)),
        (CHAT, chat("pirate ", SENTENCE)),
    ] {
        for stream in [false, true] {
            let mut body = body.clone();
            body["stream"] = json!(stream);
            let reply = shared().post(path, &body);
            assert_eq!(reply.status, 404, "{reply:?}");
            let error = &reply.json()["error"];
            assert!(error["message"].as_str().unwrap().contains(body["model"].as_str().unwrap()));
            assert_eq!(error["type"], "invalid_request_error");
            assert_eq!(error["param"], "model");
            assert_eq!(error["code"], "model_not_found");
        }
    }
}

#[test]
fn a_request_without_a_model_is_the_base_s_and_says_so() {
    let mut body = chat(BASE, SENTENCE);
    body.as_object_mut().unwrap().remove("model");
    let reply = shared().post(CHAT, &body).ok();
    assert_eq!(reply["model"], BASE);
    assert!(reply["choices"][0]["message"]["content"].as_str().unwrap().starts_with("I see."));
    assert_eq!(reply["choices"][0]["message"]["role"], "assistant");
}

#[test]
fn a_folder_s_adapters_are_asked_by_the_names_given_even_with_a_slash() {
    let server = Server::start(&[
        "--model",
        "tests/golden/models/gpt_oss",
        "--served-model-name",
        "org/base",
        "--adapter",
        "org/attn=tests/golden/adapters/gpt_oss/attn_r8",
        "--adapter",
        "plain=tests/golden/adapters/gpt_oss/experts_fused_r4",
    ]);
    let mut client = Client::connect(server.address);
    let model = client.get("/v1/models/org/attn").ok();
    assert_eq!((&model["id"], &model["parent"]), (&json!("org/attn"), &json!("org/base")));
    assert_eq!(client.get("/v1/models/org%2Fattn").ok(), model, "clients escape the slash");
    let mut texts = Vec::new();
    for name in ["org/base", "org/attn", "plain"] {
        let body = json!({"model": name, "prompt": [240, 377, 218, 155, 233], "temperature": 0,
            "ignore_eos": true});
        let reply = client.post(COMPLETIONS, &body).ok();
        assert_eq!(reply["model"], name);
        texts.push(reply["choices"][0]["text"].clone());
    }
    assert!(texts[0] != texts[1] && texts[0] != texts[2] && texts[1] != texts[2], "{texts:?}");
}

/// A cache of 128 tokens for a model of 2048: the context is what can be had.
#[test]
fn a_chat_that_sets_no_length_gets_what_the_cache_has_room_for() {
    let server = Server::start(&["--kv-memory", "512KiB"]);
    let mut client = Client::connect(server.address);
    assert_eq!(client.get("/v1/models").ok()["data"][0]["max_model_len"], 128);
    let mut body = chat(BASE, SENTENCE);
    body.as_object_mut().unwrap().remove("max_tokens");
    body["ignore_eos"] = json!(true);
    let reply = client.post(CHAT, &body).ok();
    assert_eq!(reply["choices"][0]["finish_reason"], "length");
    assert_eq!(reply["usage"]["total_tokens"], 128);
}
