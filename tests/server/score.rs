//! `score`: the golden sets and the demo model's greedy answers, through the command that lets
//! anyone hold us against PEFT.

use std::path::{Path, PathBuf};

use amphora_tests::golden::{self, F32_TOLERANCE, PROMPTS, Prompt, Run, worst};
use bytemuck::cast_slice;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

use crate::binary::{Ended, run};
use crate::questions::greedy;

/// A folder for one test's files, removed with this value.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("amphora-{test}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn file(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What stays behind is in the system's temporary folder.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The tensors of one id.
#[derive(Debug, Clone, PartialEq)]
pub struct Scored {
    id: String,
    /// [positions, vocab]
    pub logits: Vec<f32>,
    vocab: usize,
    pub ids: Vec<i64>,
    logprobs: Vec<f32>,
}

fn write(path: &str, scores: &[Scored]) {
    let mut tensors = Vec::new();
    for scored in scores {
        let mut add = |name: &str, dtype, shape: &[usize], data| {
            let view = TensorView::new(dtype, shape.to_vec(), data).unwrap();
            tensors.push((format!("{}.{name}", scored.id), view));
        };
        let (vocab, answer) = (scored.vocab, scored.ids.len());
        let shape = [scored.logits.len() / vocab, vocab];
        add("logits", Dtype::F32, &shape, cast_slice(&scored.logits));
        add("greedy_ids", Dtype::I64, &[answer], cast_slice(&scored.ids));
        add("greedy_logprobs", Dtype::F32, &[answer], cast_slice(&scored.logprobs));
    }
    safetensors::serialize_to_file(tensors, None, Path::new(path)).unwrap();
}

pub fn read(path: &str, id: &str) -> Scored {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let get = |name: &str, dtype| {
        let tensor = file.tensor(&format!("{id}.{name}")).unwrap();
        assert_eq!(tensor.dtype(), dtype, "{id}.{name}");
        (tensor.shape().to_vec(), tensor.data().to_vec())
    };
    let floats = |bytes: &[u8]| -> Vec<f32> {
        bytes.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect()
    };
    let (shape, logits) = get("logits", Dtype::F32);
    let ids = get("greedy_ids", Dtype::I64).1;
    Scored {
        id: id.to_owned(),
        logits: floats(&logits),
        vocab: shape[1],
        ids: ids.chunks_exact(8).map(|word| i64::from_le_bytes(word.try_into().unwrap())).collect(),
        logprobs: floats(&get("greedy_logprobs", Dtype::F32).1),
    }
}

pub fn write_lines(path: &str, lines: &[Value]) {
    let lines: Vec<String> = lines.iter().map(Value::to_string).collect();
    std::fs::write(path, lines.join("\n")).unwrap();
}

pub fn score(args: &[&str], input: &str, output: &str) -> Ended {
    let ended = run(&[&["score", "--input", input, "--output", output], args].concat());
    assert!(ended.status.success(), "{ended:?}");
    ended
}

/// Every run's every prompt of a golden set.
fn golden_lines(model: &str) -> Vec<(Value, Prompt)> {
    let mut lines = Vec::new();
    for run in Run::all(model).unwrap() {
        let name = run.adapter.clone().unwrap_or_else(|| "base".to_owned());
        for prompt in PROMPTS {
            let stored = run.prompt(prompt).unwrap();
            let line = json!({
                "id": format!("{name}.{prompt}"),
                "adapter": run.adapter,
                "tokens": stored.tokens,
                "max_new_tokens": stored.greedy_ids.len(),
            });
            lines.push((line, stored));
        }
    }
    lines
}

fn golden_args(model: &str) -> Vec<String> {
    let mut args = vec!["--model".to_owned(), format!("tests/golden/models/{model}")];
    for name in golden::adapters(model).unwrap() {
        args.push("--adapter".to_owned());
        args.push(format!("{name}=tests/golden/adapters/{model}/{name}"));
    }
    args
}

/// The golden outputs as a file of scores. Positions before `logits_start` are not stored; they are
/// taken from `scored`.
fn golden_scores(lines: &[(Value, Prompt)], scored: &str) -> Vec<Scored> {
    let golden = |(line, stored): &(Value, Prompt)| {
        let mut golden = read(scored, line["id"].as_str().unwrap());
        assert_eq!(golden.vocab, stored.vocab);
        golden.logits.truncate(stored.logits_start * stored.vocab);
        golden.logits.extend(&stored.logits);
        golden.ids = stored.greedy_ids.iter().map(|&id| i64::from(id)).collect();
        golden.logprobs.clone_from(&stored.greedy_logprobs);
        golden
    };
    lines.iter().map(golden).collect()
}

#[test]
fn golden_logits_and_greedy_tokens_of_all_adapters_in_one_batch_are_peft_s() {
    let folder = Folder::new("golden");
    let lines = golden_lines("gpt_oss");
    let (input, output) = (folder.file("in.jsonl"), folder.file("out.safetensors"));
    write_lines(&input, &lines.iter().map(|(line, _)| line.clone()).collect::<Vec<_>>());
    let args = golden_args("gpt_oss");
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    score(&args, &input, &output);

    let mut most = 0_f32;
    for (line, stored) in &lines {
        let scored = read(&output, line["id"].as_str().unwrap());
        assert_eq!(scored.logits.len(), stored.tokens.len() * stored.vocab, "{line}");
        let rows = &scored.logits[stored.logits_start * stored.vocab..];
        let (logit, _) = worst(rows, &stored.logits);
        let (logprob, _) = worst(&scored.logprobs, &stored.greedy_logprobs);
        assert!(logit <= F32_TOLERANCE && logprob <= F32_TOLERANCE, "{line}: {logit} {logprob}");
        let ids: Vec<i64> = stored.greedy_ids.iter().map(|&id| i64::from(id)).collect();
        assert_eq!(scored.ids, ids, "{line}");
        most = most.max(logit).max(logprob);
    }
    println!("golden gpt_oss, {} lines mixed: largest difference {most:e}", lines.len());

    // The command's own judgement is the same, in f32 and, by the other rule, in bf16.
    let (reference, rough) = (folder.file("golden.safetensors"), folder.file("bf16.safetensors"));
    write(&reference, &golden_scores(&lines, &output));
    let compared = run(&["score", "--compare", &reference, &output]);
    assert_eq!(compared.status.code(), Some(0), "{compared:?}");
    score(&[&args[..], &["--dtype", "bf16"]].concat(), &input, &rough);
    let compared = run(&["score", "--dtype", "bf16", "--compare", &reference, &rough]);
    println!("bf16: {}", compared.out.lines().last().unwrap());
    assert_eq!(compared.status.code(), Some(0), "{compared:?}");
    let strict = run(&["score", "--compare", &reference, &rough]);
    assert_eq!(strict.status.code(), Some(1), "bf16 is not f32: {strict:?}");

    // However the batch is cut, the bits are the same.
    let cut = folder.file("cut.safetensors");
    let small = ["--max-seqs", "5", "--max-batch-tokens", "16", "--threads", "1"];
    score(&[&args[..], &small].concat(), &input, &cut);
    assert_eq!(std::fs::read(&cut).unwrap(), std::fs::read(&output).unwrap());
}

/// `generate.py` computed them with transformers and PEFT; the closing token is one of them.
#[test]
fn the_demo_s_greedy_answers_are_peft_s_token_for_token_in_both_types() {
    let folder = Folder::new("greedy");
    let (input, output) = (folder.file("in.jsonl"), folder.file("out.safetensors"));
    let lines = greedy();
    let inputs = lines.iter().enumerate().map(|(index, line)| {
        json!({"id": format!("g{index}"), "adapter": line.adapter, "tokens": line.prompt_ids,
            "max_new_tokens": line.greedy_ids.len()})
    });
    write_lines(&input, &inputs.collect::<Vec<_>>());
    for dtype in ["f32", "bf16"] {
        score(&["--dtype", dtype], &input, &output);
        let (mut equal, mut base) = (0, 0);
        for (index, line) in lines.iter().enumerate() {
            let same = read(&output, &format!("g{index}")).ids == line.greedy_ids;
            match &line.adapter {
                Some(adapter) => {
                    assert!(same, "{dtype} {adapter}: {}", line.prompt);
                    equal += 1;
                }
                // The base's stories are near ties.
                None => base += usize::from(same),
            }
        }
        assert_eq!(equal, 30);
        println!("{dtype}: {equal} of 30 adapter answers and {base} of 5 base stories are equal");
    }
}

/// C08: logits and log-probabilities of the base beside four busy adapters, with LoRA on and none
/// loaded, and without LoRA. On the CPU not only the tokens but the bits are equal.
#[test]
fn c08_base_logits_are_bit_for_bit_the_same_without_lora_as_beside_adapters() {
    let folder = Folder::new("base");
    let (input, output) = (folder.file("in.jsonl"), folder.file("out.safetensors"));
    let mut lines: Vec<Value> = golden_lines("gpt_oss").into_iter().map(|(line, _)| line).collect();
    write_lines(&input, &lines);
    let args = golden_args("gpt_oss");
    score(&args.iter().map(String::as_str).collect::<Vec<_>>(), &input, &output);
    lines.retain(|line| line["adapter"].is_null());
    let base = |path: &str| -> Vec<Scored> {
        lines.iter().map(|line| read(path, line["id"].as_str().unwrap())).collect()
    };
    let busy = base(&output);
    assert_eq!(busy.len(), 4);
    write_lines(&input, &lines);
    for lora in [&[][..], &["--no-lora"]] {
        score(&[&["--model", "tests/golden/models/gpt_oss"], lora].concat(), &input, &output);
        assert!(base(&output) == busy, "{lora:?}");
    }
}

#[test]
fn compare_passes_a_file_with_itself_and_names_the_id_that_differs() {
    let folder = Folder::new("compare");
    let scored = |id: &str| Scored {
        id: id.to_owned(),
        logits: (0..8 * 5).map(|i| ((i * 7) % 11) as f32).collect(),
        vocab: 5,
        ids: vec![3, 1],
        logprobs: vec![-0.5, -1.5],
    };
    let good = vec![scored("first"), scored("second"), scored("third")];
    let mut logit = good.clone();
    logit[1].logits[17] += 0.01;
    let mut token = good.clone();
    token[1].ids[1] = 2;
    let mut logprob = good.clone();
    logprob[1].logprobs[0] = f32::NAN;
    let reference = folder.file("reference.safetensors");
    let other = folder.file("other.safetensors");
    write(&reference, &good);
    let compare = |more: &[&str]| {
        run(&[&["score", "--compare", reference.as_str(), other.as_str()], more].concat())
    };

    write(&other, &good);
    let same = compare(&[]);
    assert_eq!(same.status.code(), Some(0), "{same:?}");
    assert!(["first", "second", "third"].iter().all(|id| same.out.contains(id)), "{same:?}");
    for changed in [&logit, &token, &logprob] {
        write(&other, changed);
        let different = compare(&[]);
        assert_eq!(different.status.code(), Some(1), "{different:?}");
        let failed: Vec<&str> =
            different.out.lines().filter(|line| line.contains("FAIL")).collect();
        assert!(matches!(failed[..], [line] if line.starts_with("second")), "{different:?}");
    }
    write(&other, &logit);
    assert_eq!(compare(&["--tolerance", "0.1"]).status.code(), Some(0));
    write(&other, &good[..2]);
    compare(&[]).assert_refused(&["'third'"]);
    std::fs::write(&other, "no tensors").unwrap();
    compare(&[]).assert_refused(&["other.safetensors"]);
    std::fs::remove_file(&other).unwrap();
    compare(&[]).assert_refused(&["other.safetensors"]);
}

#[test]
fn input_that_cannot_be_scored_is_refused_by_line_or_id() {
    let folder = Folder::new("input");
    let (input, output) = (folder.file("in.jsonl"), folder.file("out.safetensors"));
    let line = json!({"id": "a", "adapter": null, "tokens": [1, 2], "max_new_tokens": 2});
    for (field, value, names) in [
        ("tokens", json!([]), &["in.jsonl", "line 2", "tokens"][..]),
        ("tokens", json!([5000]), &["'b'", "5000"]),
        ("tokens", json!(vec![5; 3000]), &["'b'", "2048"]),
        ("adapter", json!("ghost"), &["'b'", "ghost"]),
        ("max_new_tokens", json!(-1), &["in.jsonl", "line 2"]),
        ("id", json!("a"), &["in.jsonl", "line 2", "'a'"]),
    ] {
        let mut second = line.clone();
        second["id"] = json!("b");
        second[field] = value;
        write_lines(&input, &[line.clone(), second]);
        run(&["score", "--input", &input, "--output", &output]).assert_refused(names);
        assert!(!Path::new(&output).exists(), "nothing is written");
    }
    run(&["score", "--input", "no/such.jsonl", "--output", &output])
        .assert_refused(&["no/such.jsonl"]);
}
