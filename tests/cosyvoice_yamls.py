"""The yaml of a CosyVoice folder of each version, in the form of upstream's: entries that say something of the model.

    YAML[version], to be filled with the numbers of cosyvoice_layouts.py
"""

SEEDS = """# set random seed, so that you may reproduce your result.
__set_seed1: !apply:random.seed [1986]
__set_seed2: !apply:numpy.random.seed [1986]
__set_seed3: !apply:torch.manual_seed [1986]
__set_seed4: !apply:torch.cuda.manual_seed_all [1986]
"""
SAMPLING = """    sampling: !name:cosyvoice.utils.common.ras_sampling
        top_p: 0.8
        top_k: 25
        win_size: 10
        tau_r: 0.1
"""
CFM = """        in_channels: 240
        n_spks: 1
        spk_emb_dim: 80
        cfm_params: !new:omegaconf.DictConfig
            content:
                sigma_min: 1e-06
                solver: 'euler'
                t_scheduler: 'cosine'
                training_cfg_rate: 0.2
                inference_cfg_rate: 0.7
                reg_loss_type: 'l1'
"""
ENCODER = """        output_size: {width}
        attention_heads: {flow_heads}
        linear_units: {flow_inner}
        num_blocks: {flow_blocks}
        dropout_rate: 0.1
        positional_dropout_rate: 0.1
        attention_dropout_rate: 0.1
        normalize_before: True
        input_layer: 'linear'
        pos_enc_layer_type: 'rel_pos_espnet'
        selfattention_layer_type: 'rel_selfattn'
        input_size: {width}
        use_cnn_module: False
        macaron_style: False
"""
HIFT = """hift: !new:cosyvoice.hifigan.generator.{kind}
    in_channels: 80
    base_channels: {{channels}}
    nb_harmonics: 8
    sampling_rate: !ref <sample_rate>
    nsf_alpha: 0.1
    nsf_sigma: 0.003
    nsf_voiced_threshold: 10
    upsample_rates: {rates}
    upsample_kernel_sizes: {kernels}
    istft_params:
        n_fft: 16
        hop_len: 4
    resblock_kernel_sizes: [3, 7, 11]
    resblock_dilation_sizes: [[1, 3, 5], [1, 3, 5], [1, 3, 5]]
    source_resblock_kernel_sizes: {sources}
    source_resblock_dilation_sizes: {dilations}
    lrelu_slope: 0.1
    audio_limit: 0.99
{more}    f0_predictor: !new:cosyvoice.hifigan.f0_predictor.{f0}
        num_class: 1
        in_channels: 80
        cond_channels: {{f0}}
"""
CENTRED = {"kind": "HiFTGenerator", "f0": "ConvRNNF0Predictor", "more": ""}
THREE = {
    "rates": "[8, 5, 3]", "kernels": "[16, 11, 7]", "sources": "[7, 7, 11]",
    "dilations": "[[1, 3, 5], [1, 3, 5], [1, 3, 5]]",
}  # fmt: skip
TWO = {"rates": "[8, 8]", "kernels": "[16, 16]", "sources": "[7, 11]", "dilations": "[[1, 3, 5], [1, 3, 5]]"}
MEL = """feat_extractor: !name:matcha.utils.audio.mel_spectrogram
    n_fft: {n_fft}
    num_mels: 80
    sampling_rate: !ref <sample_rate>
    hop_size: {hop}
    win_size: {n_fft}
    fmin: 0
    fmax: {fmax}
    center: False
"""
UNET = """        estimator: !new:cosyvoice.flow.decoder.{kind}
            in_channels: 320
            out_channels: 80
            channels: {channels}
            dropout: 0.0
            attention_head_dim: 64
            n_blocks: {{n_blocks}}
            num_mid_blocks: {{mid}}
            num_heads: {{unet_heads}}
            act_fn: 'gelu'
"""

YAML_1 = (
    SEEDS
    + """sample_rate: 22050
text_encoder_input_size: {text_in}
llm_input_size: {dims}
llm_output_size: {dims}
spk_embed_dim: 192
llm: !new:cosyvoice.llm.llm.TransformerLM
    text_encoder_input_size: !ref <text_encoder_input_size>
    llm_input_size: !ref <llm_input_size>
    llm_output_size: !ref <llm_output_size>
    text_token_size: {text_vocab}
    speech_token_size: {codes}
    length_normalized_loss: True
    lsm_weight: 0
    spk_embed_dim: !ref <spk_embed_dim>
    text_encoder: !new:cosyvoice.transformer.encoder.ConformerEncoder
        input_size: !ref <text_encoder_input_size>
        output_size: {dims}
        attention_heads: {heads}
        linear_units: {inner}
        num_blocks: {text_blocks}
        dropout_rate: 0.1
        positional_dropout_rate: 0.1
        attention_dropout_rate: 0
        normalize_before: True
        input_layer: 'linear'
        pos_enc_layer_type: 'rel_pos_espnet'
        selfattention_layer_type: 'rel_selfattn'
        use_cnn_module: False
        macaron_style: False
        use_dynamic_chunk: False
        use_dynamic_left_chunk: False
        static_chunk_size: 1
    llm: !new:cosyvoice.transformer.encoder.TransformerEncoder
        input_size: !ref <llm_input_size>
        output_size: !ref <llm_output_size>
        attention_heads: {heads}
        linear_units: {inner}
        num_blocks: {blocks}
        dropout_rate: 0.1
        positional_dropout_rate: 0.1
        attention_dropout_rate: 0
        input_layer: 'linear_legacy'
        pos_enc_layer_type: 'rel_pos_espnet'
        selfattention_layer_type: 'rel_selfattn'
        static_chunk_size: 1
"""
    + SAMPLING
    + """flow: !new:cosyvoice.flow.flow.MaskedDiffWithXvec
    input_size: {width}
    output_size: 80
    spk_embed_dim: !ref <spk_embed_dim>
    output_type: 'mel'
    vocab_size: {codes}
    input_frame_rate: {rate}
    only_mask_loss: True
    encoder: !new:cosyvoice.transformer.encoder.ConformerEncoder
"""
    + ENCODER
    + """    length_regulator: !new:cosyvoice.flow.length_regulator.InterpolateRegulator
        channels: 80
        sampling_ratios: [1, 1, 1, 1]
    decoder: !new:cosyvoice.flow.flow_matching.ConditionalCFM
"""
    + CFM
    + UNET.format(kind="ConditionalDecoder", channels="[{unet}, {unet}]")
    + HIFT.format(**CENTRED | TWO)
    + """get_tokenizer: !name:{tokenizer}.tokenizer.get_tokenizer
    multilingual: True
    num_languages: 100
    language: 'en'
    task: 'transcribe'
allowed_special: 'all'
"""
    + MEL.format(n_fft=1024, hop=256, fmax=8000)
)

TIMES = """token_frame_rate: 25
token_mel_ratio: 2
chunk_size: 25
num_decoding_left_chunks: -1
"""
QWEN2_LM = (
    SEEDS
    + """sample_rate: 24000
llm_input_size: {hidden}
llm_output_size: {hidden}
spk_embed_dim: 192
qwen_pretrain_path: ''
"""
    + TIMES
    + """llm: !new:cosyvoice.llm.llm.CosyVoice3LM
    llm_input_size: !ref <llm_input_size>
    llm_output_size: !ref <llm_output_size>
    speech_token_size: {codes}
    length_normalized_loss: True
    lsm_weight: 0
    mix_ratio: [5, 15]
    llm: !new:cosyvoice.llm.llm.Qwen2Encoder
        pretrain_path: !ref <qwen_pretrain_path>
"""
    + SAMPLING
)
CAUSAL_FLOW = """    output_size: 80
    spk_embed_dim: !ref <spk_embed_dim>
    output_type: 'mel'
    vocab_size: {codes}
    input_frame_rate: !ref <token_frame_rate>
    only_mask_loss: True
    token_mel_ratio: !ref <token_mel_ratio>
    pre_lookahead_len: 3
"""
CHUNKS = """            static_chunk_size: !ref <chunk_size> * <token_mel_ratio>
            num_decoding_left_chunks: !ref <num_decoding_left_chunks>
"""
YAML_2 = (
    QWEN2_LM.replace("CosyVoice3LM", "Qwen2LM")
    + "flow: !new:cosyvoice.flow.flow.CausalMaskedDiffWithXvec\n    input_size: {width}\n"
    + CAUSAL_FLOW
    + "    encoder: !new:cosyvoice.transformer.upsample_encoder.UpsampleConformerEncoder\n"
    + ENCODER
    + """        use_dynamic_chunk: True
        static_chunk_size: !ref <chunk_size>
    decoder: !new:cosyvoice.flow.flow_matching.CausalConditionalCFM
"""
    + CFM
    + UNET.format(kind="CausalConditionalDecoder", channels="[{unet}]")
    + CHUNKS
    + HIFT.format(**CENTRED | THREE)
    + MEL.format(n_fft=1920, hop=480, fmax=8000)
)
YAML_3 = (
    QWEN2_LM
    + "flow: !new:cosyvoice.flow.flow.CausalMaskedDiffWithDiT\n    input_size: 80\n"
    + CAUSAL_FLOW
    + """    pre_lookahead_layer: !new:cosyvoice.transformer.upsample_encoder.PreLookaheadLayer
        in_channels: 80
        channels: {look_ahead}
        pre_lookahead_len: 3
    decoder: !new:cosyvoice.flow.flow_matching.CausalConditionalCFM
"""
    + CFM
    + """        estimator: !new:cosyvoice.flow.DiT.dit.DiT
            dim: {dim}
            depth: {depth}
            heads: {dit_heads}
            dim_head: 64
            ff_mult: 2
            mel_dim: 80
            mu_dim: 80
            spk_dim: 80
            out_channels: 80
"""
    + CHUNKS
    + HIFT.format(
        **THREE, kind="CausalHiFTGenerator", f0="CausalConvRNNF0Predictor", more="    conv_pre_look_right: 4\n"
    )
    + MEL.format(n_fft=1920, hop=480, fmax="null")
)
YAML = {1: YAML_1, 2: YAML_2, 3: YAML_3}
