//! Edits of a stored adapter that keep it well-formed JSON and safetensors, so that fuzzing spends
//! its time behind the parsers: names, pairs, shapes, ranks, patterns and targets.

use arbitrary::Arbitrary;
use safetensors::SafeTensors;
use serde_json::{Map, Value, json};

use crate::golden::{ADAPTERS, Golden};

/// Most edits of one kind; more say nothing new and cost time.
const MOST_EDITS: usize = 12;
/// Larger tensors are not made; no shape of the model needs them.
const MOST_TENSOR_BYTES: usize = 1 << 20;

/// What is done to which adapter.
#[derive(Debug, Clone, Arbitrary)]
pub struct Mutation {
    adapter: u8,
    config: Vec<ConfigEdit>,
    tensors: Vec<TensorEdit>,
    /// Positions, modulo the file's length, and what is xored there.
    bytes: Vec<(u32, u8)>,
}

#[derive(Debug, Clone, Arbitrary)]
enum ConfigEdit {
    Set { field: u8, value: Json },
    Remove { field: u8 },
    Pattern { alpha: bool, key: Key, value: Json },
}

/// Values that fields take or should refuse.
#[derive(Debug, Clone, Arbitrary)]
enum Json {
    Null,
    Bool(bool),
    Small(u8),
    Integer(i64),
    Number(f64),
    Text(String),
    Texts(Vec<String>),
    Modules(Vec<u8>),
    Empty,
}

/// A pattern's key: a module's end, or anything.
#[derive(Debug, Clone, Arbitrary)]
enum Key {
    Module(u8),
    Any(String),
}

#[derive(Debug, Clone, Arbitrary)]
struct TensorEdit {
    tensor: u8,
    change: Change,
}

#[derive(Debug, Clone, Arbitrary)]
enum Change {
    Rename(Name),
    Copy(Name),
    Shape(Vec<u16>),
    Extent { axis: u8, length: u16 },
    Transpose,
    DType(u8),
    Drop,
}

#[derive(Debug, Clone, Arbitrary)]
enum Name {
    Any(String),
    Module { layer: u8, module: u8, half: bool },
    Expert { block: u8, layer: u8, expert: u8, projection: u8, half: bool },
}

const FIELDS: &[&str] = &[
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "target_parameters",
    "peft_version",
    "peft_type",
    "bias",
    "init_lora_weights",
    "use_dora",
    "modules_to_save",
    "base_model_name_or_path",
];

const MODULES: &[&str] = &[
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.router",
    "mlp.experts",
    "mlp.experts.base_layer",
    "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj",
    "mlp.router.weight",
    "q_proj",
    "experts",
    "mlp.gate",
    "mlp.gate.weight",
    "mlp.gate_proj",
    "mlp.down_proj",
    "block_sparse_moe.gate",
    "block_sparse_moe.experts",
    "block_sparse_moe.experts.base_layer",
    ".*(?:q|k)_proj",
    "(?=x)y",
];

const PROJECTIONS: &[&str] =
    &["gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"];

/// The modules that hold experts.
const BLOCKS: &[&str] = &["mlp", "block_sparse_moe"];

/// Types by the header's names, and their bytes.
const DTYPES: &[(&str, usize)] =
    &[("F32", 4), ("BF16", 2), ("F16", 2), ("F64", 8), ("I32", 4), ("U8", 1), ("F8_E4M3", 1)];

fn pick<T: Copy>(from: &[T], index: u8) -> T {
    from[usize::from(index) % from.len()]
}

/// A tensor while it is edited.
#[derive(Debug, Clone)]
struct Tensor {
    name: String,
    dtype: (&'static str, usize),
    shape: Vec<usize>,
    data: Vec<u8>,
}

impl Mutation {
    /// Whether the adapter stays as it was stored.
    pub fn is_none(&self) -> bool {
        self.config.is_empty() && self.tensors.is_empty() && self.bytes.is_empty()
    }

    /// The number of the adapter's model, and its configuration and weights after the edits.
    pub fn apply(&self) -> (usize, Vec<u8>, Vec<u8>) {
        let golden = pick(ADAPTERS, self.adapter);
        let mut weights = match self.tensors.is_empty() {
            true => golden.weights.to_vec(),
            false => write(&self.edit_tensors(read(&golden))),
        };
        let length = weights.len();
        for &(at, xor) in self.bytes.iter().take(MOST_EDITS) {
            weights[at as usize % length] ^= xor;
        }
        (golden.model, self.edit_config(&golden), weights)
    }

    fn edit_config(&self, golden: &Golden) -> Vec<u8> {
        let mut config: Map<String, Value> =
            serde_json::from_str(golden.config).expect("a stored configuration is an object");
        for edit in self.config.iter().take(MOST_EDITS) {
            match edit {
                ConfigEdit::Set { field, value } => {
                    config.insert(pick(FIELDS, *field).to_owned(), value.value());
                }
                ConfigEdit::Remove { field } => {
                    config.remove(pick(FIELDS, *field));
                }
                ConfigEdit::Pattern { alpha, key, value } => {
                    let field = if *alpha { "alpha_pattern" } else { "rank_pattern" };
                    let key = match key {
                        Key::Module(module) => pick(MODULES, *module),
                        Key::Any(text) => text,
                    };
                    // An earlier edit may have put something else there.
                    if let Some(Value::Object(patterns)) = config.get_mut(field) {
                        patterns.insert(key.to_owned(), value.value());
                    }
                }
            }
        }
        Value::Object(config).to_string().into_bytes()
    }

    fn edit_tensors(&self, mut tensors: Vec<Tensor>) -> Vec<Tensor> {
        for edit in self.tensors.iter().take(MOST_EDITS) {
            if tensors.is_empty() {
                break;
            }
            let at = usize::from(edit.tensor) % tensors.len();
            match &edit.change {
                Change::Drop => {
                    tensors.remove(at);
                }
                Change::Copy(name) => {
                    let copy = Tensor { name: name.text(), ..tensors[at].clone() };
                    tensors.push(copy);
                }
                Change::Rename(name) => tensors[at].name = name.text(),
                Change::Shape(shape) => {
                    let shape = shape.iter().take(4).map(|&n| usize::from(n)).collect();
                    tensors[at].reshape(shape);
                }
                Change::Extent { axis, length } => {
                    let mut shape = tensors[at].shape.clone();
                    if !shape.is_empty() {
                        let axis = usize::from(*axis) % shape.len();
                        shape[axis] = usize::from(*length);
                    }
                    tensors[at].reshape(shape);
                }
                Change::Transpose => tensors[at].shape.reverse(),
                Change::DType(dtype) => {
                    tensors[at].dtype = pick(DTYPES, *dtype);
                    let shape = tensors[at].shape.clone();
                    tensors[at].reshape(shape);
                }
            }
        }
        tensors
    }
}

impl Tensor {
    /// Takes the shape and as many bytes as it needs, repeating what is there.
    fn reshape(&mut self, shape: Vec<usize>) {
        let bytes = shape.iter().try_fold(self.dtype.1, |product, &n| product.checked_mul(n));
        if let Some(bytes) = bytes.filter(|&bytes| bytes <= MOST_TENSOR_BYTES) {
            let source = if self.data.is_empty() { &[0][..] } else { &self.data[..] };
            self.data = source.iter().copied().cycle().take(bytes).collect();
            self.shape = shape;
        } else {
            // Sized for the type it may just have been given, at no elements.
            (self.shape, self.data) = (vec![0], Vec::new());
        }
    }
}

impl Json {
    fn value(&self) -> Value {
        match self {
            Json::Null => Value::Null,
            Json::Bool(on) => json!(on),
            Json::Small(number) => json!(number),
            Json::Integer(number) => json!(number),
            Json::Number(number) => json!(number),
            Json::Text(text) => json!(text),
            Json::Texts(texts) => json!(texts),
            Json::Modules(modules) => {
                modules.iter().map(|&module| pick(MODULES, module)).collect::<Vec<_>>().into()
            }
            Json::Empty => json!({}),
        }
    }
}

impl Name {
    fn text(&self) -> String {
        let half = |half: &bool| if *half { "lora_B" } else { "lora_A" };
        match self {
            Name::Any(text) => text.clone(),
            Name::Module { layer, module, half: h } => {
                // One layer more than there are, so that the range is tried too.
                let (layer, module) = (layer % 5, pick(MODULES, *module));
                format!("base_model.model.model.layers.{layer}.{module}.{}.weight", half(h))
            }
            Name::Expert { block, layer, expert, projection, half: h } => {
                let (layer, expert) = (layer % 5, expert % 9);
                let (block, projection) = (pick(BLOCKS, *block), pick(PROJECTIONS, *projection));
                format!(
                    "base_model.model.model.layers.{layer}.{block}.experts.{expert}.{projection}.{}.weight",
                    half(h)
                )
            }
        }
    }
}

/// The tensors of a stored adapter, by name.
fn read(golden: &Golden) -> Vec<Tensor> {
    let file = SafeTensors::deserialize(golden.weights).expect("a stored file is sound");
    let mut tensors: Vec<Tensor> = file
        .iter()
        .map(|(name, view)| {
            let dtype = view.dtype().to_string();
            let dtype = DTYPES.iter().find(|(name, _)| *name == dtype);
            Tensor {
                name: name.to_owned(),
                dtype: *dtype.expect("stored adapters are of known types"),
                shape: view.shape().to_vec(),
                data: view.data().to_vec(),
            }
        })
        .collect();
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    tensors
}

/// A safetensors file of them, two of one name included: that file is not sound.
fn write(tensors: &[Tensor]) -> Vec<u8> {
    let mut entries = Vec::new();
    let mut data = Vec::new();
    for tensor in tensors {
        let start = data.len();
        data.extend_from_slice(&tensor.data);
        let info = json!({
            "dtype": tensor.dtype.0, "shape": tensor.shape, "data_offsets": [start, data.len()],
        });
        entries.push(format!("{}:{info}", json!(tensor.name)));
    }
    let header = format!("{{{}}}", entries.join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.into_bytes());
    file.extend(data);
    file
}
