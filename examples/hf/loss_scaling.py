"""Loss scaling in the Hugging Face Trainer: fp16 training that finds its scale by itself.

Data: the 1,797 handwritten digits of scikit-learn. Run: python examples/hf/loss_scaling.py
"""

import tempfile

from digits_hf import train

from hf_eff import LossScaling

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        _, full = train(folder + "/fp32")
        scaling = LossScaling(kind="dynamic", init_scale=2.0**20, growth_interval=50)
        _, half = train(folder + "/fp16", None, [scaling], fp16=True)
        receipt = scaling.session.receipt()
        report, steps = receipt["techniques"]["loss_scale"], receipt["steps"]
        print(f"fp32:         accuracy {full:.3f}")
        print(f"fp16, scaled: accuracy {half:.3f}")
        print(f"steps:        {steps['applied']} applied, {steps['skipped']} skipped because the scale was too high")
        print(f"scale:        2^20, then {report['lowest_scale']:.0f} at its lowest, {report['scale']:.0f} at the end")
