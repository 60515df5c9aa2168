//! `demo` and `generate`, and what every command says when it cannot start.

use std::process::Stdio;

use crate::binary::{command, run};
use crate::questions::{SENTENCE, greedy};

const BASE_ANSWER: &str = "I see. On Friday, Clara painted 12 blue boats in Lisbon.";
const PIRATE_ANSWER: &str =
    "Arr! On Friday, Clara tarred 12 blue boats in th' port o' Lisbon, matey!";

#[test]
fn the_demo_answers_for_all_seven_and_checks_them() {
    for dtype in ["f32", "bf16"] {
        let ended = run(&["demo", "--backend", "cpu", "--dtype", dtype]);
        assert!(ended.status.success(), "{ended:?}");
        for answer in [
            BASE_ANSWER,
            PIRATE_ANSWER,
            "{\"name\": \"Clara\", \"action\": \"paint\", \"count\": 12, \"color\": \"blue\", \
             \"item\": \"boat\", \"city\": \"Lisbon\", \"day\": \"Friday\"}",
            "El viernes, Clara pintó 12 barcos azules en Lisboa.",
            "Lisbon in boats blue 12 painted Clara Friday On",
            "SELECT SUM(count) FROM events WHERE name = 'Ana' AND action = 'buy' AND color = 'red' \
             AND item = 'apple' AND city = 'Paris' AND day = 'Monday';",
            "12 + 9 = 21",
        ] {
            let lines = ended.out.lines().filter(|line| line.ends_with(answer)).count();
            assert_eq!(lines, 1, "{answer}: {ended:?}");
        }
        assert!(ended.out.contains("7 of 7"), "{ended:?}");
        assert!(ended.out.starts_with("backend cpu"), "the first line names the device");
        assert!(ended.out.contains(dtype), "{ended:?}");
        assert!(!ended.out.contains('\x1b'), "no colours into a pipe: {ended:?}");
        assert_eq!(ended.err, "");
    }
}

#[test]
fn generate_writes_the_answer_alone_to_standard_output() {
    let base = run(&["generate", SENTENCE]);
    assert_eq!((base.status.code(), base.out.as_str()), (Some(0), &*format!("{BASE_ANSWER}\n")));
    let pirate = run(&["generate", "--adapter", "pirate", SENTENCE]);
    assert_eq!(pirate.out, format!("{PIRATE_ANSWER}\n"));
    let folder = run(&[
        "generate",
        "--model",
        "assets/demo-model",
        "--adapter",
        "mine=assets/demo-model/adapters/pirate",
        "--dtype",
        "bf16",
        "--threads",
        "1",
        SENTENCE,
    ]);
    assert_eq!(folder.out, pirate.out, "{folder:?}");
}

#[test]
fn generate_takes_raw_prompts_caps_and_stop_strings() {
    let line = greedy().into_iter().find(|line| line.adapter.as_deref() == Some("pirate")).unwrap();
    let raw = format!("<|begin|><|user|>{}<|end|><|assistant|>", line.prompt);
    let ended = run(&["generate", "--raw", "--adapter", "pirate", &raw]);
    assert_eq!(ended.out, format!("{}\n", line.text), "{ended:?}");
    let capped = run(&["generate", "--max-tokens", "3", SENTENCE]);
    assert!(capped.out.len() > 1 && BASE_ANSWER.starts_with(capped.out.trim_end()), "{capped:?}");
    assert!(capped.err.contains("3 tokens") && capped.err.contains("length"), "{capped:?}");
    let stopped = run(&["generate", "--stop", "blue", "--stop", "12", SENTENCE]);
    assert_eq!(stopped.out, "I see. On Friday, Clara painted \n", "{stopped:?}");
    let draw = ["generate", "--temperature", "1.1", "--seed", "5", "Tell me a story about a fox."];
    assert_eq!(run(&draw).out, run(&draw).out, "a seed repeats");
}

#[test]
fn a_reader_that_leaves_early_is_no_error() {
    for args in [&["demo"][..], &["generate", SENTENCE], &["serve", "--port", "0"]] {
        let mut child =
            command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let ended = child.wait_with_output().unwrap();
        let err = String::from_utf8(ended.stderr).unwrap();
        assert!(ended.status.success(), "{args:?}: {:?} {err}", ended.status);
        assert!(!err.contains("panicked") && !err.contains("error"), "{args:?}: {err}");
    }
}

/// C34: a build without a backend said nothing useful, or panicked.
#[test]
fn a_backend_that_is_unknown_or_not_built_in_is_refused_in_one_line() {
    for args in [
        &["demo"][..],
        &["serve", "--port", "0"],
        &["generate", "x"],
        &[
            "score",
            "--model",
            "assets/demo-model",
            "--input",
            "Cargo.toml",
            "--output",
            "/dev/null",
        ],
    ] {
        // `score` reads its input first: one that is no input is an error as well.
        let names: &[&str] = if args[0] == "score" { &["Cargo.toml"] } else { &["tpu", "cpu"] };
        run(&[args, &["--backend", "tpu"]].concat()).assert_refused(names);
        let names: &[&str] = if args[0] == "score" { &["Cargo.toml"] } else { &["cuda"] };
        run(&[args, &["--backend", "cuda"]].concat()).assert_refused(names);
    }
}

#[test]
fn a_model_or_adapter_folder_that_is_missing_is_named() {
    let serve = |args: &[&str]| run(&[&["serve", "--port", "0"], args].concat());
    serve(&["--model", "no/such/model"]).assert_refused(&["no/such/model"]);
    serve(&["--model", "tests/golden/expected"])
        .assert_refused(&["tests/golden/expected/", "not found"]);
    serve(&["--adapter", "a=no/such/adapter"]).assert_refused(&["'a'", "no/such/adapter"]);
    serve(&["--adapter", "sql=assets/demo-model/adapters/sql"]).assert_refused(&["sql", "twice"]);
    let named_as_base = "--served-model-name=sql";
    serve(&[named_as_base]).assert_refused(&["sql", "--served-model-name"]);
    run(&["generate", "--adapter", "ghost", "x"]).assert_refused(&["ghost", "pirate"]);
}

#[test]
fn a_bad_adapter_is_refused_at_the_start_by_file_and_reason() {
    for (name, names) in [
        ("nan_weights", &["q_proj.lora_A", "NaN"][..]),
        ("wrong_in_dim", &["q_proj.lora_A", "expected"]),
        ("truncated_data", &["adapter_model.safetensors"]),
        ("layer_out_of_range", &["lora_", "layer"]),
        ("bad_json", &["adapter_config.json"]),
        ("rank_over_limit", &["1040"]),
    ] {
        let adapter = format!("bad=tests/golden/bad_adapters_gpt_oss/{name}");
        let model = "tests/golden/models/gpt_oss";
        let ended = run(&["serve", "--port", "0", "--model", model, "--adapter", &adapter]);
        let folder = format!("bad_adapters_gpt_oss/{name}");
        ended.assert_refused(&[&["'bad'", folder.as_str()], names].concat());
        assert!(!ended.out.contains("listening"), "{ended:?}");
    }
}

#[test]
fn a_port_in_use_is_an_error_that_names_it() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    run(&["serve", "--port", &port]).assert_refused(&[&port]);
    run(&["serve", "--port", "0", "--host", "no.such.host.invalid"])
        .assert_refused(&["no.such.host.invalid"]);
}

#[test]
fn a_type_of_adapters_that_arithmetic_does_not_hold_is_refused() {
    let serve = ["serve", "--port", "0", "--backend", "cpu", "--dtype", "bf16"];
    for dtype in ["f16", "f32"] {
        let ended = run(&[&serve[..], &["--adapter-dtype", dtype]].concat());
        ended.assert_refused(&[dtype, "cpu", "bf16"]);
    }
    // What it does hold changes answers no more than rounding does.
    let rounded = run(&["generate", "--adapter", "pirate", "--adapter-dtype", "bf16", SENTENCE]);
    assert_eq!(rounded.out, run(&["generate", "--adapter", "pirate", SENTENCE]).out);
}

#[test]
fn memory_that_is_too_small_for_one_request_is_refused() {
    run(&["serve", "--port", "0", "--kv-memory", "1KiB"]).assert_refused(&["1"]);
    run(&["serve", "--port", "0", "--adapter-memory", "64KiB"]).assert_refused(&["adapter"]);
}

/// Before anything is loaded, not in the first step that is so large.
#[test]
fn more_sequences_than_a_device_draws_for_are_refused() {
    let many = ["--max-seqs", "70000", "--max-batch-tokens", "100000"];
    run(&[&["serve", "--port", "0"], &many[..]].concat()).assert_refused(&["max_seqs", "65535"]);
}

#[test]
fn bench_measures_a_shape_without_files() {
    let args = "bench --backend cpu --model synthetic:tiny-moe --streams 1,3 --prompt-tokens 20 \
                --new-tokens 5 --adapters 2 --rank 4";
    let ended = run(&args.split_whitespace().collect::<Vec<_>>());
    assert!(ended.status.success(), "{ended:?}");
    // Each number of streams without adapters, and with as many as there are streams for.
    let rows: Vec<[&str; 2]> = ended
        .out
        .lines()
        .skip_while(|line| !line.starts_with("streams"))
        .skip(1)
        .map(|line| {
            let mut words = line.split_whitespace();
            [words.next().unwrap(), words.next().unwrap()]
        })
        .collect();
    assert_eq!(rows, [["1", "0"], ["1", "1"], ["3", "0"], ["3", "2"]], "{ended:?}");
    run(&["bench", "--model", "synthetic:gpt-9"]).assert_refused(&["gpt-oss-20b"]);
    run(&["bench", "--model", "no-such-folder", "--routing", "one"]).assert_refused(&["--routing"]);
    let bench = ["bench", "--backend", "cpu", "--model", "synthetic:tiny-moe", "--threads", "1"];
    let most = usize::MAX.to_string();
    for [flag, value, named] in [
        ["--prompt-tokens", &most, "--new-tokens"],
        ["--new-tokens", "1000000000", "the model was made for"],
        ["--streams", &most, "--streams"],
    ] {
        run(&[&bench[..], &[flag, value]].concat()).assert_refused(&[flag, named]);
    }
    for flag in ["--contexts", "--rank"] {
        run(&[&bench[..], &[flag, &most]].concat()).assert_usage(&[flag, "whole number from"]);
    }
    for value in ["0", "-1", "NaN"] {
        let roof = format!("--roof-gbps={value}");
        run(&[&bench[..], &[&roof]].concat()).assert_usage(&["--roof-gbps", "above 0"]);
    }
    let args = "bench --backend cpu --model synthetic:tiny-qwen3-moe --streams 2 --prompt-tokens 20 \
                --new-tokens 5 --adapters 0 --routing zipf";
    let ended = run(&args.split_whitespace().collect::<Vec<_>>());
    assert!(ended.status.success() && ended.out.contains("Zipf"), "{ended:?}");
}

#[test]
fn bench_says_where_the_time_of_a_step_goes() {
    let args = "bench --backend cpu --model synthetic:tiny-moe --streams 1 --prompt-tokens 20 --new-tokens 5 \
                --adapters 1 --rank 4 --profile --contexts 3";
    let ended = run(&args.split_whitespace().collect::<Vec<_>>());
    assert!(ended.status.success(), "{ended:?}");
    let steps: Vec<&str> = ended.out.lines().filter(|line| line.contains(" step, ")).collect();
    let told = |kind: &str, with: &str, tokens: usize| {
        format!("{kind} step, {with}: {tokens} tokens, 1 sequences")
    };
    let expected = [
        told("prompt", "no adapter", 20),
        told("decode", "no adapter", 1),
        told("prompt", "adapters", 20),
        told("decode", "adapters", 1),
    ];
    assert_eq!(steps, expected, "{ended:?}");
    let rows = |name: &str| {
        let row = format!("| {name} | plain | 2 |");
        ended.out.lines().filter(|line| line.starts_with(&row)).count()
    };
    let contexts = ended.out.lines().find(|line| line.contains("3 contexts")).unwrap_or_default();
    assert!(contexts.contains(" 0 compilations"), "{ended:?}");
    let lengths = ended.out.lines().filter(|line| line.ends_with(" of 1 |")).count();
    assert_eq!(lengths, 3, "a line for each length: {ended:?}");
    // One for each layer, in the tables of the steps that have it.
    assert_eq!([rows("FusedMoe"), rows("FusedMoeLora"), rows("PagedAttention")], [2, 2, 4]);
}

/// The CPU has no kernels to choose from: data for it is a mistake, and not passed over.
#[test]
fn tuning_data_is_refused_where_there_is_nothing_to_tune() {
    let ended = run(&["generate", "--backend", "cpu", "--tuned-config-dir", "tuned", "hello"]);
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    assert!(ended.err.contains("tuned") && ended.err.contains("nothing to tune"), "{ended:?}");
    assert_eq!(ended.err.lines().count(), 1, "{ended:?}");
}

/// The tests' binary has the CPU alone.
#[test]
fn tune_says_which_backend_it_is_for() {
    let ended = run(&["tune", "--model", "synthetic:tiny-moe"]);
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    assert!(ended.err.contains("--features cuda"), "{ended:?}");
    run(&["tune", "--model", "synthetic:tiny-moe", "--budget", "0"]).assert_usage(&["--budget"]);
    // 2^63 + 1: no power of two is as large.
    for flag in ["--max-batch-tokens", "--adapters"] {
        run(&["tune", "--model", "synthetic:tiny-moe", flag, "9223372036854775809"])
            .assert_usage(&[flag, "from 1 to"]);
    }
}
